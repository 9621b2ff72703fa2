"""The architectures: what their config.json says in the words of `arch`, transformers' defaults where it is silent.

Every key is consumed, or listed here as informational with the reason, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.io.hf.jsonfile import Settings
from cortiq_fcd.io.hf.rotary import RECORD, RECORDED_KEYS, arch_keys, rope_settings

MISTRAL_WINDOW = 4096  # transformers' default when a Mistral config has no sliding_window at all
MOST = 65536  # layers, and sizes of a head: lists are made that long, and a hostile number would fill the memory

Biases = Literal["none", "qkv", "as attention_bias says"]


@dataclass(frozen=True)
class Family:
    """One architecture. `delta`: it has GatedDeltaNet layers and gated attention; `fused`: q, k, v and z of those lie
    in one matrix. `windows`: how it says which layers slide.
    """

    model_type: str
    architecture: str
    biases: Biases = "as attention_bias says"
    qk_norm: bool = False
    windows: Literal["never", "all", "by layer"] = "never"
    head_dim: int | None = None
    delta: bool = False
    fused: bool = False

    @property
    def norm_style(self) -> str:
        """Whether gains are w or 1 + w."""
        return "gemma" if self.delta else "qwen"

    @property
    def partial_rotary_factor(self) -> float:
        """The share of a head that turns, when config.json is silent."""
        return 0.25 if self.delta else 1.0


_QWEN3_5 = Family("qwen3_5_text", "Qwen3_5ForCausalLM", qk_norm=True, head_dim=256, delta=True)
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM"),
    "mistral": Family("mistral", "MistralForCausalLM", biases="none", windows="all"),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases="qkv", windows="by layer"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="by layer", head_dim=128),
    "qwen3_next": Family("qwen3_next", "Qwen3NextForCausalLM", qk_norm=True, head_dim=256, delta=True, fused=True),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
}

KINDS = {
    "full_attention": "FullAttention",
    "sliding_attention": "SlidingAttention",
    "linear_attention": "LinearAttention",
}
LINEAR_SIZES: Mapping[str, int] = {  # and transformers' defaults
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

# Keys that do not change what the network computes for a text.
_LABEL, _TRAINING, _RUNTIME = "a label", "only used in training", "how a library runs the model, not what it computes"
_TEXT, _EXTRA_HEAD = "stored from generation_config.json and its like", "extra prediction heads are left out, and told"
_SPARSE = "only used by layers with experts, and those are refused"
INFORMATIONAL: Mapping[str, str] = {
    **dict.fromkeys(("_name_or_path", "name_or_path", "transformers_version", "id2label", "label2id"), _LABEL),
    **dict.fromkeys(("model_type", "tokenizer_class", "torch_dtype", "dtype", "task_specific_params"), _LABEL),
    **dict.fromkeys(("finetuning_task", "unsloth_version", "unsloth_fixed", "language", "is_llama_config"), _LABEL),
    **dict.fromkeys(("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop"), _TRAINING),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "problem_type"), _TRAINING),
    **dict.fromkeys(("max_sequence_length", "transformers.js_config"), _RUNTIME),
    **dict.fromkeys(("use_cache", "pretraining_tp", "_attn_implementation", "attn_implementation"), _RUNTIME),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict", "torchscript"), _RUNTIME),
    **dict.fromkeys(("_attn_implementation_autoset", "mamba_ssm_dtype", "use_bfloat16", "max_length"), _RUNTIME),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"), _TEXT),
    **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"), _EXTRA_HEAD),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"), _SPARSE),
    "norm_topk_prob": _SPARSE,
}
# Keys that may be there as long as they ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attn_output_gate": (True,),  # of Qwen3.5: always on in its code
    "output_gate_type": ("swish", "silu"),
    "quantization_config": ({},),
    "auto_map": ({},),
    "chunk_size_feed_forward": (0,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
# Beside a nested text_config: settings of the other parts of such a model, which a text never meets.
_OUTER = "belongs to images or video, which are left out"
OUTER_INFORMATIONAL: Mapping[str, str] = {
    **INFORMATIONAL,
    **dict.fromkeys(("vision_config", "image_token_id", "video_token_id", "audio_config"), _OUTER),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "language_model_only"), _OUTER),
}


@dataclass(frozen=True)
class Described:
    """A config.json, understood: its family, `arch` (but for tie_word_embeddings), and the rope settings to record.

    `tied` is what config.json says, None where it is silent; `attention_bias` which biases the tensors must have.
    """

    family: Family
    arch: dict[str, Any]
    rope: dict[str, Any]
    tied: bool | None
    biases: tuple[str, ...]
    notes: tuple[str, ...]


def describe(config: Mapping[str, Any]) -> Described:
    """Read a config.json; UnsupportedModelError names the first key that can't be followed."""
    inner = config.get("text_config")
    outer_tied = None
    if isinstance(inner, dict):
        outer = Settings({key: value for key, value in config.items() if key != "text_config"})
        outer_tied = _tied(outer)
        _check_architectures(outer)
        outer.finish(OUTER_INFORMATIONAL, NEUTRAL)
        settings = Settings(inner, "config.json: text_config.")
    else:
        settings = Settings(config)
    family = _family(settings)
    _check_architectures(settings)
    tied = _tied(settings)
    described = _described(settings, family, tied if outer_tied is None else outer_tied)
    settings.finish(INFORMATIONAL, NEUTRAL)
    return described


def _tied(settings: Settings) -> bool | None:
    return settings.take("tie_word_embeddings", bool) if settings.has("tie_word_embeddings") else None


def _family(settings: Settings) -> Family:
    model_type = settings.take("model_type", str)
    if model_type not in FAMILIES:
        settings.refuse("model_type", f"{model_type!r} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _check_architectures(settings: Settings) -> None:
    """A model with another head than a language model's is another function."""
    for name in settings.take("architectures", list, []):
        if not (isinstance(name, str) and name.endswith(("ForCausalLM", "ForConditionalGeneration"))):
            settings.refuse("architectures", f"expected a language model (...ForCausalLM), got {str(name)[:80]!r}")


def _described(settings: Settings, family: Family, tied: bool | None) -> Described:
    layers = settings.size("num_hidden_layers", most=MOST)
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    head_dim = settings.size("head_dim", family.head_dim or max(1, hidden // heads), most=MOST)
    positions = settings.size("max_position_embeddings", 32768)
    rope = rope_settings(settings, family.partial_rotary_factor)
    if not family.delta and rope["partial_rotary_factor"] != 1:
        settings.refuse("partial_rotary_factor", f"{family.model_type} turns whole heads")
    kinds, window, notes = _layer_kinds(settings, family, layers)
    arch: dict[str, Any] = {
        "arch_name": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": settings.size("intermediate_size"),
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": settings.size("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": settings.size("vocab_size"),
        "layer_types": kinds,
        "rms_norm_eps": settings.positive("rms_norm_eps", 1e-6),
        "norm_style": family.norm_style,
        **arch_keys(rope, head_dim, positions, settings.maybe("original_max_position_embeddings")),
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        **({"sliding_window": window} if "SlidingAttention" in kinds else {}),
        **(_linear_arch(settings) if family.delta else {}),
    }
    if family.delta:
        _refuse_experts(settings, layers)
    biases = _biases(settings, family)
    return Described(family, arch, rope, tied, biases, notes)


def _layer_kinds(settings: Settings, family: Family, count: int) -> tuple[list[str], int | None, tuple[str, ...]]:
    """CMF's layer_types, the sliding window (None: there is none), and what to tell."""
    given = settings.take("layer_types", list) if settings.has("layer_types") else None
    if family.windows == "never":
        interval = settings.size("full_attention_interval", 4) if family.delta else 1
        window, derived = None, [("linear" if (i + 1) % interval else "full") for i in range(count)]
        notes: tuple[str, ...] = ()
    elif family.windows == "all":
        window, notes = _mistral_window(settings)
        derived = [("full" if window is None else "sliding")] * count
    else:
        first = settings.take("max_window_layers", int, 28)
        default = 4096 if settings.silent("sliding_window") else None  # null says no window
        window = settings.size("sliding_window") if settings.has("sliding_window") else default
        window, notes = (window if settings.take("use_sliding_window", bool, False) else None), ()
        derived = [("full" if window is None or i < first else "sliding") for i in range(count)]
    kinds = [f"{kind}_attention" for kind in derived]
    if given is not None:
        kinds = _given_kinds(settings, family, given, kinds, window)
    return [KINDS[kind] for kind in kinds], window, notes


def _mistral_window(settings: Settings) -> tuple[int | None, tuple[str, ...]]:
    """Null says no window; only a config that does not mention it gets the library's default."""
    if settings.silent("sliding_window"):
        return MISTRAL_WINDOW, (f"config.json has no sliding_window: transformers' default {MISTRAL_WINDOW} counts",)
    return (settings.size("sliding_window") if settings.has("sliding_window") else None), ()


def _given_kinds(
    settings: Settings, family: Family, given: list[Any], derived: list[str], window: int | None
) -> list[str]:
    """The list in config.json, if it is one that the family's code follows."""
    allowed = {"full_attention"} | ({"linear_attention"} if family.delta else set())
    if family.windows == "by layer" and window is not None:
        allowed.add("sliding_attention")
    if len(given) != len(derived):
        settings.refuse("layer_types", f"expected {len(derived)} entries, got {len(given)}")
    if family.windows == "all":
        if given != derived:
            settings.refuse("layer_types", f"a {family.model_type} model gives all its layers the same attention")
        return derived
    for i, kind in enumerate(given):
        if not isinstance(kind, str) or kind not in allowed:
            settings.refuse(
                f"layer_types[{i}]", f"{str(kind)[:80]!r} can't be; expected {' or '.join(sorted(allowed))}"
            )
    return given


def _linear_arch(settings: Settings) -> dict[str, Any]:
    sizes = {key: settings.size(key, default) for key, default in LINEAR_SIZES.items()}
    core = {
        "kind": "gated_delta_net",
        "num_heads": sizes["linear_num_value_heads"],
        "value_head_dim": sizes["linear_value_head_dim"],
    }
    return {"linear_core": core, **sizes}


def _refuse_experts(settings: Settings, layers: int) -> None:
    """Only models whose layers are all dense; the rule of Qwen3-Next."""
    experts = settings.take("num_experts", int, 512 if settings.has("num_experts_per_tok") else 0)
    step = settings.size("decoder_sparse_step", 1)
    dense = settings.take("mlp_only_layers", list, [])
    sparse = [i for i in range(layers) if i not in dense and experts > 0 and (i + 1) % step == 0]
    if sparse:
        settings.refuse("num_experts", f"layer {sparse[0]} has {experts} experts; only dense layers are supported")


def _biases(settings: Settings, family: Family) -> tuple[str, ...]:
    """Which of q, k, v, o have a bias."""
    usual = family.biases == "qkv"
    said = settings.take("attention_bias", bool, usual)
    if family.biases == "as attention_bias says":
        return tuple("qkvo") if said else ()
    if said != usual:
        settings.refuse("attention_bias", f"{said} has no effect in a {family.model_type} model, and was meant to")
    return tuple("qkv") if usual else ()


def record(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a CMF header keeps of the rope settings, for a way back; None where `arch` says it all."""
    return {RECORD: {key: rope[key] for key in RECORDED_KEYS if key in rope}} if rope["rope_type"] == "llama3" else None


def require_tied(tied: bool | None, has_head: bool) -> bool:
    """Whether the head is the embedding. Where config.json is silent: transformers' default, which all these families
    share, is a head of its own, unless there is none. UnsupportedModelError when the head that it speaks of is missing.
    """
    if tied is False and not has_head:
        raise UnsupportedModelError("lm_head.weight", "config.json says it is not tied, and there is no such tensor")
    return not has_head if tied is None else tied
