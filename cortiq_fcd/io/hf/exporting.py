"""A CMF file as a HuggingFace directory: config.json, safetensors, tokenizer files.

What config.json can't say is refused by name. The O(1) setting is not part of such a directory: the model comes back
with exact attention. Rope settings are written in the older spelling, which old and new transformers read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.io.hf.families import FAMILIES, KINDS, LINEAR_SIZES, Biases, Family
from cortiq_fcd.io.hf.importing import RECORDED
from cortiq_fcd.io.hf.names import fused_rows, layer_names
from cortiq_fcd.io.hf.rotary import RECORD, rope_parameters
from cortiq_fcd.io.hf.safetensors import Weights
from cortiq_fcd.io.reader import CmfModel

# Keys of `arch` that no config.json of these families has, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "embed_multiplier": (1,),
    "logit_multiplier": (1,),
    "num_loops": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "rope_local_base_freq": (),
    "local_partial_rotary_factor": (),
}
_BIASES: Mapping[Biases, tuple[str, ...]] = {"none": ("",), "qkv": ("qkv",), "as attention_bias says": ("", "qkvo")}


@dataclass(frozen=True)
class Exported:
    """One tensor of the directory."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Weights]


@dataclass(frozen=True)
class Export:
    """What will be written: the JSON files' contents by file name, the tensors in the order of the CMF file."""

    files: Mapping[str, Mapping[str, Any]]
    tokenizer: bytes | None
    tensors: tuple[Exported, ...]
    notes: tuple[str, ...]


def plan_export(model: CmfModel, dtype: str) -> Export:
    """Plan the directory of a model that `plan_model` accepts; `dtype` is f32, f16 or bf16.

    UnsupportedModelError names the key or tensor that such a directory can't hold.
    """
    arch = {key: value for key, value in model.arch.items() if value is not None}
    _refuse_what_has_no_key(arch)
    names = [name for name in model.tensors if not name.startswith("skill.")]
    family, biases = _choose_family(model, arch, set(names))
    width = _ffn_width(model, arch["num_layers"])
    recorded = ((model.header.get("provenance") or {}).get(RECORDED) or {}).get(RECORD)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **_sizes(arch, width),
        **_rope(arch, _head_dim(arch), recorded),
        **_family_keys(family, arch, biases),
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    ids = _token_ids(model.header.get("tokenizer_config"))
    files = {"config.json": {**config, **ids}, "generation_config.json": ids}
    tensors = tuple(_tensors(model, family, arch, names))
    return Export(files, model.section("vocab"), tensors, tuple(_notes(model, len(names))))


def _refuse_what_has_no_key(arch: Mapping[str, Any]) -> None:
    neutral = {**_NEUTRAL, "query_pre_attn_scalar": (_head_dim(arch),)}
    for key, values in neutral.items():
        if key in arch and arch[key] not in values:
            raise UnsupportedModelError(f"arch.{key}", f"{arch[key]} has no place in a config.json of these families")
    heads = arch.get("attention_heads_per_layer") or []
    if any(h != arch["num_attention_heads"] for h in heads):
        raise UnsupportedModelError("arch.attention_heads_per_layer", "config.json gives all layers the same heads")


def _head_dim(arch: Mapping[str, Any]) -> int:
    return int(arch.get("head_dim") or arch["hidden_size"] // arch["num_attention_heads"])


def _choose_family(model: CmfModel, arch: Mapping[str, Any], names: set[str]) -> tuple[Family, str]:
    """The family of arch_name if the model is one, else the first that it is; and which projections have biases."""
    named = FAMILIES.get(str(arch.get("arch_name")))
    families = ([named] if named else []) + [family for family in FAMILIES.values() if family is not named]
    obstacles = []
    for family in families:
        for biases in _BIASES[family.biases]:
            obstacle = _obstacle(model, arch, names, family, biases)
            if obstacle is None:
                return family, biases
            obstacles.append(obstacle)
    subject, why = obstacles[0]
    raise UnsupportedModelError(subject, f"no family of transformers that is known here has this model: {why}")


def _obstacle(
    model: CmfModel, arch: Mapping[str, Any], names: set[str], family: Family, biases: str
) -> tuple[str, str] | None:
    """Why the model is not of the family: the key or tensor, and the reason."""
    kinds = arch["layer_types"]
    if arch.get("norm_style", "qwen") != family.norm_style:
        return "arch.norm_style", f"{family.model_type} has {family.norm_style!r}"
    if not family.delta and arch.get("partial_rotary_factor", 1) != 1:
        return "arch.partial_rotary_factor", f"{family.model_type} turns whole heads"
    if family.model_type == "llama" and arch["hidden_size"] % arch["num_attention_heads"]:
        return "arch.num_attention_heads", "llama needs a divisor of hidden_size"
    if not set(kinds) <= _possible_kinds(family) or (family.windows == "all" and len(set(kinds)) > 1):
        return "arch.layer_types", f"{family.model_type} has no such layers"
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    wanted |= set() if arch.get("tie_word_embeddings") else {"lm_head.weight"}
    for i, kind in enumerate(kinds):
        wanted |= {f"model.layers.{i}.{name}" for name, _ in layer_names(kind, family, tuple(biases))}
    for name in sorted(wanted ^ names):
        return name, f"{family.model_type} {'needs' if name in wanted else 'has no'} such a tensor"
    rows = arch["num_attention_heads"] * _head_dim(arch) * (2 if family.delta else 1)
    for i, kind in enumerate(kinds):
        name = f"model.layers.{i}.self_attn.q_proj.weight"
        if kind != "LinearAttention" and model.tensors[name].shape[0] != rows:
            return name, f"{family.model_type} has {rows} rows there"
    return None


def _possible_kinds(family: Family) -> set[str]:
    possible = {"FullAttention"}
    if family.windows != "never":
        possible.add("SlidingAttention")
    return possible | ({"LinearAttention"} if family.delta else set())


def _ffn_width(model: CmfModel, layers: int) -> int:
    names = [f"model.layers.{i}.mlp.gate_proj.weight" for i in range(layers)]
    width = model.tensors[names[0]].shape[0]
    for name in names:
        if model.tensors[name].shape[0] != width:
            why = f"config.json gives all layers one FFN width ({width}), this one has {model.tensors[name].shape[0]}"
            raise UnsupportedModelError(name, why)
    return width


def _sizes(arch: Mapping[str, Any], width: int) -> dict[str, Any]:
    return {
        "hidden_size": arch["hidden_size"],
        "intermediate_size": width,
        "num_hidden_layers": arch["num_layers"],
        "num_attention_heads": arch["num_attention_heads"],
        "num_key_value_heads": arch.get("num_kv_heads", arch["num_attention_heads"]),
        "head_dim": _head_dim(arch),
        "vocab_size": arch["vocab_size"],
        "rms_norm_eps": arch.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(arch.get("tie_word_embeddings")),
        "max_position_embeddings": arch.get("max_position_embeddings", 32768),
        "hidden_act": "silu",
    }


def _rope(arch: Mapping[str, Any], head_dim: int, recorded: Any) -> dict[str, Any]:
    settings = rope_parameters(arch, head_dim, recorded)
    theta, partial = settings.pop("rope_theta"), settings.pop("partial_rotary_factor")
    scaling = None if settings["rope_type"] == "default" else settings
    turning = {} if partial == 1 else {"partial_rotary_factor": partial}
    return {"rope_theta": theta, "rope_scaling": scaling, **turning}


def _family_keys(family: Family, arch: Mapping[str, Any], biases: str) -> dict[str, Any]:
    kinds, window = arch["layer_types"], arch.get("sliding_window")
    found: dict[str, Any] = {}
    if family.biases == "as attention_bias says":
        found["attention_bias"] = bool(biases)
    if family.windows == "all":
        found["sliding_window"] = window if "SlidingAttention" in kinds else None
    elif family.windows == "by layer":
        sliding = [i for i, kind in enumerate(kinds) if kind == "SlidingAttention"]
        found |= {"use_sliding_window": bool(sliding), "sliding_window": window if sliding else None}
        found["max_window_layers"] = sliding[0] if sliding else len(kinds)
    if family.windows == "by layer" or family.delta:
        words = {ours: theirs for theirs, ours in KINDS.items()}
        found["layer_types"] = [words[kind] for kind in kinds]
    if family.delta:
        found |= {key: arch[key] for key in LINEAR_SIZES if key in arch}
        found["partial_rotary_factor"] = float(arch.get("partial_rotary_factor", 1.0))
    if family.fused:  # no experts anywhere
        found |= {"num_experts": 0, "mlp_only_layers": list(range(len(kinds))), "decoder_sparse_step": 1}
    return found


def _token_ids(settings: Any) -> dict[str, Any]:
    settings = settings if isinstance(settings, dict) else {}
    eos = settings.get("eos_token_ids") or []
    ids = {"bos_token_id": settings.get("bos_token_id"), "pad_token_id": settings.get("pad_token_id")}
    return {**ids, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def _tensors(model: CmfModel, family: Family, arch: Mapping[str, Any], names: list[str]) -> Iterator[Exported]:
    vocab = arch["vocab_size"]
    for name in names:
        shape = model.tensors[name].shape
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # rows behind the vocabulary are padding
            yield Exported(name, (vocab, *shape[1:]), lambda name=name: model.decode(name)[:vocab])  # type: ignore[misc]
        elif name.endswith("conv1d.weight"):
            yield _reshaped(model, name, (shape[0], 1, shape[-1]))
        elif family.fused and ".linear_attn.in_proj_" in name:
            if name.endswith(("in_proj_qkv.weight", "in_proj_a.weight")):  # the first of each pair
                yield _fused(model, arch, name)
        else:
            yield _reshaped(model, name, shape)


def _reshaped(model: CmfModel, name: str, shape: tuple[int, ...]) -> Exported:
    return Exported(name, shape, lambda: model.decode(name).reshape(shape))


def _fused(model: CmfModel, arch: Mapping[str, Any], name: str) -> Exported:
    """in_proj_qkvz or in_proj_ba, put together from the rows of its parts."""
    prefix, part = name.removesuffix(".weight").rsplit(".", 1)
    sources = fused_rows(arch)
    whole = sources[part][0]
    pieces = {f"{prefix}.{other}.weight": rows for other, (where, rows) in sources.items() if where == whole}
    shape = (sum(rows.size for rows in pieces.values()), model.tensors[name].shape[1])

    def read() -> Weights:
        weights = np.empty(shape, np.float32)
        for piece, rows in pieces.items():
            weights[rows] = model.decode(piece)
        return weights

    return Exported(f"{prefix}.{whole}.weight", shape, read)


def _notes(model: CmfModel, tensors: int) -> Iterator[str]:
    if (model.header.get("provenance") or {}).get("o1_attn"):
        yield "the O(1) setting has no place in such a directory: transformers runs exact attention"
    if tensors < len(model.tensors):
        yield f"left out: skill overlays, {len(model.tensors) - tensors} tensors"
    if model.section("masks"):
        yield "left out: masks"
    if not model.section("vocab"):
        yield "the file has no tokenizer: none is written"


def weights_bytes(tensors: tuple[Exported, ...], item_bytes: int) -> int:
    """Size of all payloads."""
    return sum(math.prod(tensor.shape) * item_bytes for tensor in tensors)
