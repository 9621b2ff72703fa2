"""The same weights through HuggingFace transformers: exact-attention logits within 1e-3, and every field counts.

Tiny random models, logits of a few units, f32 on both sides. Each model also runs with one field taken away: its
perplexity must move by more than one percent, or the agreement would say nothing about the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.ce_kl import nll_sum
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.model.replica import hidden_states
from tests.fixtures import Shape, Source, exact_replica
from tests.model.test_fields import FIELDS
from tests.model.test_refusals import FREE

transformers = pytest.importorskip(
    "transformers", "5.24", reason="the independent implementation needs transformers 5.24"
)

LOGITS_ABSOLUTE = 1e-3
BATCH, SEQ = 2, 48
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
EVERY_OTHER = ("SlidingAttention", "FullAttention") * 2
SLIDES_EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

Arch = dict[str, Any]
Tensors = dict[str, Tensor]
Edit = Callable[[Arch, Tensors], object]


@dataclass(frozen=True)
class Case:
    """A model of transformers by its class and config, what it says in CMF, and how to take each field away."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    arch: Arch = field(default_factory=dict)
    without: Mapping[str, Edit] = field(default_factory=dict)
    edit: Callable[[torch.nn.Module], object] = lambda model: None
    vocab: int = 50


def no(*keys: str) -> Edit:
    """Without keys of arch."""

    def edit(arch: Arch, tensors: Tensors) -> None:
        for key in keys:
            del arch[key]

    return edit


def no_tensors(part: str) -> Edit:
    """Without the tensors that have `part` in their name."""

    def edit(arch: Arch, tensors: Tensors) -> None:
        names = [name for name in tensors if part in name]
        assert names
        for name in names:
            del tensors[name]

    return edit


def no_windows(arch: Arch, tensors: Tensors) -> None:
    kinds = [kind.replace("Sliding", "Full") for kind in arch["layer_types"]]
    arch["layer_types"] = kinds
    for key in ("sliding_window", "rope_local_base_freq", "local_partial_rotary_factor"):
        arch.pop(key, None)


def wider_window(arch: Arch, tensors: Tensors) -> None:
    """One key more: the count of the window's keys is as theirs."""
    arch["sliding_window"] += 1


def no_interleaved_gate(arch: Arch, tensors: Tensors) -> None:
    D = arch["head_dim"]
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        q = tensors[name]
        tensors[name] = q.view(-1, 2, D, q.shape[1])[:, 0].reshape(-1, q.shape[1])


def swapped_gate(arch: Arch, tensors: Tensors) -> None:
    """[gate; q] instead of [q; gate]."""
    D = arch["head_dim"]
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        q = tensors[name]
        tensors[name] = q.view(-1, 2, D, q.shape[1]).flip(1).reshape(q.shape)


def whole_vocabulary(arch: Arch, tensors: Tensors) -> None:
    arch["vocab_size"] = len(tensors["model.embed_tokens.weight"])


def one_narrow_ffn(model: torch.nn.Module) -> None:
    """Layer 1 keeps 24 of its 40 channels."""
    mlp = model.model.layers[1].mlp
    for part in (mlp.gate_proj, mlp.up_proj):
        part.weight = torch.nn.Parameter(part.weight[:24].clone())
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :24].clone())


def only_two_norms(model: torch.nn.Module) -> None:
    """Gemma without the norms behind its blocks, which no CMF layer has."""
    for layer in model.model.layers:
        layer.post_attention_layernorm = torch.nn.Identity()
        layer.post_feedforward_layernorm = torch.nn.Identity()


def llama3_factors(theta: float, head_dim: int) -> list[float]:
    """Plain over scaled frequencies, as transformers scales them."""
    config = transformers.LlamaConfig(
        **{**BASE, "head_dim": head_dim}, rope_scaling={"rope_type": "llama3", "rope_theta": theta, **LLAMA3}
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)
    return (plain / scaled.double()).tolist()


def yarn_case(arch: Arch, **scaling: Any) -> Case:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, **scaling}
    return Case("LlamaForCausalLM", {"rope_scaling": rope}, {"yarn": {**YARN, **arch}}, {"yarn": no("yarn")})


GEMMA: Arch = {"norm_style": "gemma"}
CASES: dict[str, Case] = {
    "llama": Case(
        "LlamaForCausalLM",
        {"attention_bias": True, "rope_theta": 500.0},
        {"rope_theta": 500.0},
        {
            "rope_theta": no("rope_theta"),
            "bias of q": no_tensors("q_proj.bias"),
            "bias of k": lambda arch, tensors: (
                no_tensors("q_proj.bias")(arch, tensors) or no_tensors("k_proj.bias")(arch, tensors)
            ),
            "bias of v": no_tensors("v_proj.bias"),
            "bias of o": no_tensors("o_proj.bias"),
            "head_dim": lambda arch, tensors: arch.update(head_dim=8, num_attention_heads=8, num_kv_heads=4),
        },
    ),
    "llama3 rope scaling": Case(
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
        {"rope_freq_factors": llama3_factors(10000.0, 16)},
        {"rope_freq_factors": no("rope_freq_factors")},
    ),
    "yarn": yarn_case({}),
    "yarn, all fields": yarn_case(
        {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.4},
        beta_fast=8.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.4,
    ),
    "yarn, mscale": yarn_case({"mscale": 2.0, "mscale_all_dim": 0.5}, mscale=2.0, mscale_all_dim=0.5),
    "qwen2": Case("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {}, {"bias of v": no_tensors("v_proj.bias")}),
    "qwen3": Case(
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True},
        {},
        {"q_norm": no_tensors("q_norm"), "k_norm": no_tensors("k_norm")},
    ),
    "head_dim 512": Case("Qwen3ForCausalLM", {"head_dim": 512, "num_hidden_layers": 2}),
    "mistral": Case(
        "MistralForCausalLM",
        {"sliding_window": 7},
        {"layer_types": ["SlidingAttention"] * 4, "sliding_window": 7},
        {"sliding_window": no_windows, "one key of the window": wider_window},
    ),
    "padded vocabulary": Case("LlamaForCausalLM", vocab=44, without={"vocab_size": whole_vocabulary}),
    "padded vocabulary, tied": Case(
        "LlamaForCausalLM", {"tie_word_embeddings": True}, vocab=44, without={"vocab_size": whole_vocabulary}
    ),
    "ffn widths by layer": Case("LlamaForCausalLM", edit=one_narrow_ffn),
    "granite": Case(
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "attention_multiplier": 1.0, "residual_multiplier": 1.0},
        {"embed_multiplier": 3.0, "logit_multiplier": 1 / 2.5, "query_pre_attn_scalar": 1.0},
        {key: no(key) for key in ("embed_multiplier", "logit_multiplier", "query_pre_attn_scalar")},
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {
            **SLIDES_EVERY_OTHER,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "sliding_window": 6,
            "query_pre_attn_scalar": 90,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
        {
            **GEMMA,
            "layer_types": list(EVERY_OTHER),
            "embed_multiplier": math.sqrt(32),
            "sliding_window": 6,
            "query_pre_attn_scalar": 90,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
        {
            **{key: no(key) for key in ("norm_style", "embed_multiplier", "query_pre_attn_scalar")},
            **{key: no(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")},
            "sliding_window": no_windows,
            "one key of the window": wider_window,
        },
        edit=only_two_norms,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        {
            **SLIDES_EVERY_OTHER,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "sliding_window": 20,
            "query_pre_attn_scalar": 9,
            "rope_theta": 20.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            **GEMMA,
            "layer_types": list(EVERY_OTHER),
            "embed_multiplier": math.sqrt(32),
            "sliding_window": 20,
            "query_pre_attn_scalar": 9,
            "rope_theta": 20.0,
            "rope_local_base_freq": 100.0,
            "rope_freq_factors": [8.0] * 8,
        },
        {
            "rope_local_base_freq": no("rope_local_base_freq"),
            "rope_freq_factors": no("rope_freq_factors"),
            "rope_theta": no("rope_theta"),
            "sliding_window": no_windows,
        },
        edit=only_two_norms,
    ),
    "step3.7": Case(
        "Step3p7TextModel",
        {
            **SLIDES_EVERY_OTHER,
            "mlp_layer_types": ["dense"] * 4,
            "sliding_window": 9,
            "num_sliding_attention_heads": 6,
            "query_pre_attn_scalar": 6,
            "rope_theta": [100.0, 20000.0] * 2,
            "partial_rotary_factors": [1.0, 0.5] * 2,
            "rope_scaling": {"rope_type": "yarn", **YARN},
        },
        {
            **GEMMA,
            "layer_types": list(EVERY_OTHER),
            "attention_heads_per_layer": [6, 4] * 2,
            "sliding_window": 9,
            "query_pre_attn_scalar": 6,
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.5,
            "rope_local_base_freq": 100.0,
            "local_partial_rotary_factor": 1.0,
            "yarn": dict(YARN),
        },
        {
            "g_proj": no_tensors("g_proj"),
            "yarn": no("yarn"),
            "rope_local_base_freq": no("rope_local_base_freq"),
            "local_partial_rotary_factor": no("local_partial_rotary_factor"),
        },
    ),
    "qwen3.5": Case(
        "Qwen3_5ForCausalLM",
        {
            **LINEAR,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_theta": 30.0,
            "tie_word_embeddings": True,
        },
        {
            **GEMMA,
            **LINEAR,
            "rope_theta": 30.0,
            "layer_types": ["LinearAttention", "FullAttention"] * 2,
            "linear_core": {"kind": "gated_delta_net", "num_heads": 6, "value_head_dim": 12},
            "partial_rotary_factor": 0.25,
        },
        {
            "norm_style": no("norm_style"),
            "partial_rotary_factor": no("partial_rotary_factor"),
            "interleaved gate": no_interleaved_gate,
            "order of q and gate": swapped_gate,
        },
    ),
    "qwen3.5, head_dim 256": Case(
        "Qwen3_5ForCausalLM",
        {**LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 256},
        {
            **GEMMA,
            **LINEAR,
            "layer_types": ["LinearAttention", "FullAttention"] * 2,
            "linear_core": {"kind": "gated_delta_net"},
            "partial_rotary_factor": 0.25,
        },
    ),
}
CASES["llama, tied"] = replace(CASES["llama"], config={"tie_word_embeddings": True}, arch={}, without={})


@dataclass(frozen=True)
class Both:
    """Their logits, and what ours is made of."""

    logits: Tensor
    ids: Tensor
    targets: Tensor
    arch: Arch
    tensors: Tensors


@cache
def theirs(name: str) -> Both:
    case = CASES[name]
    kind = getattr(transformers, case.model)
    config = kind.config_class(**{**BASE, **case.config}, attn_implementation="eager")
    torch.manual_seed(5)
    model = kind(config).eval()
    case.edit(model)
    tied = bool(config.tie_word_embeddings)
    fill(model, case.arch.get("norm_style") == "gemma", 1.0 if tied else case.arch.get("embed_multiplier", 1.0))
    ids = torch.randint(case.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(6))
    tensors = exported(model, tied=tied)
    with torch.no_grad():
        out = model(ids[:, :-1], use_cache=False)
        logits = out.logits if hasattr(out, "logits") else out.last_hidden_state @ tensors["lm_head.weight"].T
    arch = {
        "hidden_size": 32,
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": config.head_dim,
        "vocab_size": case.vocab,
        "rms_norm_eps": 1e-5,
        "layer_types": ["FullAttention"] * config.num_hidden_layers,
        "tie_word_embeddings": tied,
        **case.arch,
    }
    return Both(logits[..., : case.vocab], ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), arch, tensors)


def fill(model: torch.nn.Module, plus_one: bool, multiplier: float) -> None:
    """Weights of about the size that a trained model has; attention sharp enough that positions matter.

    `multiplier`: what embeddings will be multiplied by.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if "norm" in name:
                weight.copy_(0.3 * noise + (0 if plus_one and "linear_attn" not in name else 1))
            elif weight.dim() == 1:
                weight.copy_(0.5 * noise)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise * 0.6 / (multiplier if "embed" in name else 1.0))
            else:
                sharp = 1.7 if "q_proj" in name or "k_proj" in name else 1.1
                weight.copy_(noise * sharp / math.sqrt(weight.shape[-1]))


def exported(model: torch.nn.Module, *, tied: bool) -> Tensors:
    """Their weights by the names of the format."""
    own = {
        (name if name.startswith(("model.", "lm_head.")) else f"model.{name}"): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }
    if any("pre_feedforward_layernorm" in name for name in own):
        own = {name.replace("pre_feedforward", "post_attention"): tensor for name, tensor in own.items()}
    if tied:
        own.pop("lm_head.weight", None)
    elif "lm_head.weight" not in own:
        generator = torch.Generator().manual_seed(7)
        own["lm_head.weight"] = 0.6 * torch.randn(own["model.embed_tokens.weight"].shape, generator=generator)
    return own


def plan_of(arch: Arch, tensors: Tensors) -> ModelPlan:
    return plan_model(Source({"arch": arch}, {name: Shape(tuple(t.shape)) for name, t in tensors.items()}))


def ours(both: Both, arch: Arch, tensors: Tensors) -> tuple[Tensor, float]:
    """Logits [B, T, V] and mean NLL."""
    plan = plan_of(arch, tensors)
    replica = exact_replica(plan, tensors.__getitem__)
    rows = hidden_states(replica, both.ids, student=False)
    logits = rows @ replica.weights.head.T
    if plan.logit_softcap is not None:
        logits = plan.logit_softcap * torch.tanh(logits / plan.logit_softcap)
    nll = nll_sum(rows, replica.weights.head, both.targets.flatten(), softcap=plan.logit_softcap)
    return logits.unflatten(0, both.ids.shape), nll / both.targets.numel()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    both = theirs(name)
    logits, nll = ours(both, both.arch, both.tensors)
    assert 1 < both.logits.abs().max() < 40
    assert (logits - both.logits).abs().max() < LOGITS_ABSOLUTE
    expected = torch.nn.functional.cross_entropy(both.logits.flatten(0, 1).double(), both.targets.flatten())
    assert nll == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize(("name", "taken"), [(name, taken) for name, case in CASES.items() for taken in case.without])
def test_without_the_field_it_is_another_model(name: str, taken: str) -> None:
    both = theirs(name)
    arch, tensors = dict(both.arch), dict(both.tensors)
    CASES[name].without[taken](arch, tensors)
    nll, other = ours(both, both.arch, both.tensors)[1], ours(both, arch, tensors)[1]
    assert abs(math.expm1(other - nll)) > 0.01


def test_heads_by_layer_can_not_be_left_out() -> None:
    """Their shapes would not fit: refused, not guessed."""
    both = theirs("step3.7")
    arch = {key: value for key, value in both.arch.items() if key != "attention_heads_per_layer"}
    with pytest.raises(Exception, match="q_proj"):
        plan_of(arch, both.tensors)


def test_every_honoured_key_is_worth_more_than_a_percent_in_some_test() -> None:
    """Here or in test_fields; keys that the tensors' shapes leave one value are refused when they say another."""
    shown = {taken for case in CASES.values() for taken in case.without} | set(FIELDS)
    assert FREE.keys() - shown == set()
