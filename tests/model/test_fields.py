"""Each field against the oracle in f64: it counts, its gradients are right, and decoding with it is the same function.

Beside tests/model/test_transformers.py (another implementation) and test_gradients.py (one field a model): fields that
transformers lacks, and fields together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.ce_kl import nll_sum
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.decode import greedy, served_hidden
from cortiq_fcd.model.perplexity import perplexity_at
from cortiq_fcd.model.replica import Replica, hidden_states, loss_and_gradient, new_replica
from cortiq_fcd.model.weights import filled_by, load_weights
from tests.fixtures import LINEAR, Arrays, Tiny, in_f64
from tests.oracles import transformer
from tests.oracles.compare import worst_error

BATCH, SEQ = 2, 41
O1 = Conversion((0, 1, 2), "all", m=6, w=5, sink=2, seal=20)
EXACT = replace(O1, polish_only=True)
HYBRID = {**LINEAR, "layer_types": ["LinearAttention", "FullAttention", "LinearAttention"]}
MIDDLE = Conversion((1,), (1,), m=6, w=5, sink=2, seal=20)
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SHORT_YARN = {"factor": 8.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Varied(Tiny):
    """FFN widths layer by layer, and convolutions without their middle axis."""

    widths: tuple[int, ...] = ()
    flat_conv: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().shapes()
        for i, F in enumerate(self.widths):
            mlp = f"model.layers.{i}.mlp."
            shapes |= {mlp + "gate_proj.weight": (F, self.C), mlp + "up_proj.weight": (F, self.C)}
            shapes[mlp + "down_proj.weight"] = (self.C, F)
        for name, shape in shapes.items():
            if self.flat_conv and len(shape) == 3:
                shapes[name] = (shape[0], shape[2])
        return shapes


SLIDING_AND_CAPPED = {
    "layer_types": ["SlidingAttention", "FullAttention", "SlidingAttention"],
    "sliding_window": 9,
    "rope_local_base_freq": 50.0,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
    "query_pre_attn_scalar": 3,
}
LOOPED_HYBRID = {**HYBRID, "num_loops": 2, "loop_final_norm": True}
EVERYTHING = {
    "layer_types": ["FullAttention", "SlidingAttention", "FullAttention"],
    "sliding_window": 6,
    "local_partial_rotary_factor": 0.5,
    "partial_rotary_factor": 0.75,
    "rope_theta": 300.0,
    "yarn": YARN | {"truncate": False},
    "attention_heads_per_layer": [4, 6, 2],
    "norm_style": "gemma",
    "rms_norm_eps": 1e-3,
    "embed_multiplier": 3.0,
    "logit_multiplier": 0.4,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 5.0,
    "num_loops": 2,
    "loop_final_norm": True,
}
KINDS: dict[str, tuple[Tiny, Conversion]] = {
    "yarn and its magnitude": (Tiny(arch={"yarn": YARN, "rope_theta": 500.0}, seed=1), O1),
    "yarn, untruncated, own magnitude": (
        Tiny(arch={"yarn": YARN | {"truncate": False, "attention_factor": 1.5, "beta_fast": 4.0}}, seed=2),
        O1,
    ),
    "odd head_dim, partial rotary": (Tiny(D=7, arch={"partial_rotary_factor": 0.6}, seed=3), O1),
    "odd head_dim, one pair, gate a channel": (
        Tiny(D=5, H=3, G=3, gate="channel", arch={"partial_rotary_factor": 0.4}, seed=4),
        O1,
    ),
    "ffn widths by layer": (Varied(widths=(24, 7, 40), tied=False, seed=5), O1),
    "sliding and capped, polish only": (Tiny(arch=SLIDING_AND_CAPPED, seed=6), EXACT),
    "hybrid, one layer converted": (Tiny(gate="interleaved", arch=HYBRID, seed=7), MIDDLE),
    "hybrid, only a delta-net layer trained": (Tiny(arch=HYBRID, seed=8), replace(EXACT, layers=(0,), spec=(0,))),
    "hybrid, flat convolution, widths": (Varied(arch=HYBRID, flat_conv=True, widths=(9, 24, 30), seed=9), EXACT),
    # A seed with little cancellation: with others the oracle itself moves by 1e-8 with 4 ulp of the embedding.
    "looped hybrid": (Tiny(arch=LOOPED_HYBRID, seed=17), MIDDLE),
    "looped hybrid, all trained": (Tiny(arch=LOOPED_HYBRID, seed=11), EXACT),
    "gate a head, heads by layer, biases": (
        Tiny(gate="head", biases="qkvo", arch={"attention_heads_per_layer": [2, 6, 4]}, seed=12),
        O1,
    ),
    "interleaved gate, biases, padding": (Tiny(gate="interleaved", biases="qkvo", padding=5, seed=13), O1),
    "everything": (
        Varied(gate="head", biases="qo", padding=4, tied=False, widths=(10, 24, 33), arch=EVERYTHING, seed=14),
        Conversion((0, 2), (0, 2), m=6, w=5, sink=2, seal=20),
    ),
    "everything, polish only": (
        Varied(gate="channel", biases="kv", padding=4, widths=(10, 24, 33), arch=EVERYTHING, seed=15),
        EXACT,
    ),
}


def network(model: Tiny, setting: Conversion) -> Replica:
    """In f64, its masters a step away from the frozen weights."""
    replica = new_replica(in_f64(model.weights()), setting)
    flat = replica.masters.flat
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(1), dtype=flat.dtype), alpha=0.02)
    return replica


def doubles(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).double() for name, array in arrays.items()}


def options_of(model: Tiny, setting: Conversion) -> transformer.Options:
    """From the header itself, not from the plan under test."""
    return transformer.Options(
        model.header()["arch"], setting.converted, m=setting.m, w=setting.w, sink=setting.sink, seal=setting.seal
    )


def tokens(model: Tiny, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(model.seed).integers(0, model.V, (BATCH, length)))


@pytest.mark.parametrize("kl_weight", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("model", "setting"), KINDS.values(), ids=KINDS)
def test_gradients_are_those_of_autograd(model: Tiny, setting: Conversion, kl_weight: float) -> None:
    replica = network(model, setting)
    rows = tokens(model, SEQ + 1)
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    replica.gradient.flat.fill_(torch.nan)
    loss = loss_and_gradient(replica, ids, targets, kl_weight)
    ce, kl, want = transformer.loss_and_gradients(
        doubles(model.arrays()), replica.masters.named, options_of(model, setting), ids, targets, kl_weight
    )
    assert loss.ce == pytest.approx(ce, rel=1e-9)
    assert loss.kl == pytest.approx(kl, rel=1e-7)
    assert replica.gradient.named.keys() == want.keys()
    errors = {name: worst_error(replica.gradient.named[name], gradient) for name, gradient in want.items()}
    assert {name: error for name, error in errors.items() if not error < 1e-8} == {}


# Decoding


@pytest.mark.parametrize("prefill", [1, 4, 17, 30])
@pytest.mark.parametrize(("model", "setting"), KINDS.values(), ids=KINDS)
def test_decoding_is_the_teacher_forced_form(model: Tiny, setting: Conversion, prefill: int) -> None:
    """Prompts shorter and longer than a sliding window; the student through the O(1) kernel where it has one."""
    replica, ids = network(model, setting), tokens(model, 40)
    for student in (False, True):
        exact = served_hidden(replica, ids, prefill, student=student, served=False)
        whole = hidden_states(replica, ids, student=student).unflatten(0, ids.shape)[:, prefill:]
        assert worst_error(exact, whole) < 1e-11
    served = served_hidden(replica, ids, prefill, student=True, served=True)
    forced = hidden_states(replica, ids, student=True, seal=prefill).unflatten(0, ids.shape)[:, prefill:]
    # Two visits through nearly cancelling denominators amplify: 4 ulp of the embedding can move such a model by 3e-9.
    assert worst_error(served, forced) < 1e-8


@pytest.mark.parametrize("name", ["sliding and capped, polish only", "looped hybrid", "everything"])
def test_greedy_takes_the_largest_logit_of_the_vocabulary(name: str) -> None:
    model, setting = KINDS[name]
    replica, prompts = network(model, setting), tokens(model, 30)
    rows = torch.tensor(greedy(replica, prompts, 12, (), student=True, served=True))
    ids = torch.cat((prompts, rows), 1)
    hidden = hidden_states(replica, ids, student=True, seal=30).unflatten(0, ids.shape)
    head = options_of(model, setting).head(doubles(model.arrays()))
    assert torch.equal((hidden[:, 29:-1] @ head.T).argmax(-1), rows)
    assert rows.max() < model.V


# What a field is worth


@dataclass(frozen=True)
class Without:
    """A model, and the same with one field taken away."""

    model: Tiny
    arch: Mapping[str, Any] = field(default_factory=dict)
    tensors: str = ""  # those with this in their name are left out

    def other(self) -> Tiny:
        arch = {key: value for key, value in {**self.model.arch, **self.arch}.items() if value is not None}
        return replace(self.model, arch=arch, gate="" if self.tensors else self.model.gate)


FIELDS: dict[str, Without] = {
    "g_proj a head": Without(Tiny(gate="head", seed=20), tensors="g_proj"),
    "g_proj a channel": Without(Tiny(gate="channel", seed=21), tensors="g_proj"),
    "num_loops": Without(Tiny(arch={"num_loops": 2}, seed=22), {"num_loops": None}),
    "loop_final_norm": Without(
        Tiny(arch={"num_loops": 2, "loop_final_norm": True}, seed=23), {"loop_final_norm": None}
    ),
    "logit_multiplier": Without(Tiny(arch={"logit_multiplier": 0.6}, seed=24), {"logit_multiplier": None}),
    "embed_multiplier": Without(Tiny(arch={"embed_multiplier": 3.0}, seed=25), {"embed_multiplier": None}),
    "final_logit_softcapping": Without(
        Tiny(arch={"final_logit_softcapping": 1.5}, seed=26), {"final_logit_softcapping": None}
    ),
    "rms_norm_eps": Without(Tiny(arch={"rms_norm_eps": 0.5}, seed=27), {"rms_norm_eps": 1e-6}),
    "local_partial_rotary_factor": Without(
        Tiny(
            arch={
                "layer_types": ["SlidingAttention"] * 3,
                "sliding_window": 12,
                "rope_local_base_freq": 3.0,
                "local_partial_rotary_factor": 0.5,
            },
            seed=28,
        ),
        {"local_partial_rotary_factor": None},
    ),
    "yarn of sliding layers without angles of their own": Without(
        Tiny(
            arch={
                "layer_types": ["SlidingAttention"] * 3,
                "sliding_window": 12,
                "rope_theta": 20.0,
                "yarn": YARN | {"attention_factor": 1.6, "beta_slow": 500.0},
            },
            seed=29,
        ),
        {"yarn": None},
    ),
    "layer_types": Without(
        Tiny(arch={"layer_types": ["SlidingAttention"] * 3, "sliding_window": 5}, seed=30),
        {"layer_types": ["FullAttention"] * 3, "sliding_window": None},
    ),
    # The same tensors with another split of the key channels into heads.
    "linear_num_key_heads with linear_key_head_dim": Without(
        Tiny(arch=HYBRID, seed=31), {"linear_num_key_heads": 4, "linear_key_head_dim": 3}
    ),
    **{
        f"yarn's {' and '.join(own)}": Without(
            Tiny(arch={"rope_theta": 20.0, "yarn": SHORT_YARN | own}, seed=32), {"yarn": SHORT_YARN}
        )
        for own in (
            {"factor": 2.0},
            {"original_max_position_embeddings": 16},
            {"beta_fast": 3.0},
            {"beta_slow": 2.5},
            {"truncate": False},
            {"attention_factor": 1.8},
            {"mscale": 4.0, "mscale_all_dim": 0.5},
        )
    },
}


def sharp(arrays: Arrays) -> dict[str, Tensor]:
    """Weights with pointed attention and large mixer outputs, so that a change there is seen in the text."""
    factors = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0, "embed": 1.5}
    tensors = doubles(arrays)
    return {n: t * next((f for part, f in factors.items() if part in n), 1.0) for n, t in tensors.items()}


def perplexity(model: Tiny, tensors: Mapping[str, Tensor], rows: Tensor) -> tuple[float, float]:
    """(ours, the oracle's) over rows [B, T + 1]."""
    weights = load_weights(model.plan(), filled_by(lambda name: tensors[name].float()), torch.device("cpu"))
    replica = new_replica(in_f64(weights), EXACT)
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].flatten()
    hidden = hidden_states(replica, ids, student=False)
    ours = nll_sum(hidden, replica.weights.head, targets, softcap=replica.weights.plan.logit_softcap) / len(targets)
    options = options_of(model, EXACT)
    theirs = options.loss(transformer.hidden(tensors, options, ids, student=False), tensors, targets).mean()
    flat = np.concatenate([row.numpy() for row in rows])
    again = perplexity_at(replica, flat, [0, rows.shape[1]], rows.shape[1] - 1, 2, student=False)
    assert again == pytest.approx(math.exp(ours), rel=1e-12)
    return math.exp(ours), theirs.exp().item()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_worth_more_than_a_percent(name: str) -> None:
    case = FIELDS[name]
    tensors = {key: t.float().double() for key, t in sharp(case.model.arrays()).items()}
    rows = tokens(case.model, 49)
    ours, theirs = perplexity(case.model, tensors, rows)
    assert ours == pytest.approx(theirs, rel=1e-10)
    left = {key: t for key, t in tensors.items() if not case.tensors or case.tensors not in key}
    other, others = perplexity(case.other(), left, rows)
    assert other == pytest.approx(others, rel=1e-10)
    assert abs(other / ours - 1) > 0.01
