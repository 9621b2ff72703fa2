"""Loss and gradients of the whole model against torch.autograd in f64; every hand-written backward is called."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cortiq_fcd.kernels
from cortiq_fcd.model.adamw import gradient_norm
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.perplexity import perplexity_at
from cortiq_fcd.model.replica import Replica, hidden_states, loss_and_gradient, new_replica, reset_masters
from tests.fixtures import LINEAR, Tiny, in_f64, tensors_in
from tests.oracles import loss as loss_oracle
from tests.oracles import transformer
from tests.oracles.compare import Unchanged, worst_error

BATCH, SEQ = 2, 41
O1 = Conversion(layers=(0, 1, 2), spec="all", m=6, w=5, sink=2, seal=20)
EXACT = Conversion(layers=(0, 1, 2), spec="all", m=6, w=5, sink=2, seal=15)

MODELS: dict[str, tuple[Tiny, Conversion, float]] = {
    "GQA, qk-norm, tied": (Tiny(), O1, 0.7),
    "KL alone": (Tiny(seed=1), O1, 1.0),
    "CE alone": (Tiny(seed=2), O1, 0.0),
    "one kv head, untied, no qk-norm": (Tiny(H=3, G=1, qk_norm=False, tied=False, seed=3), O1, 0.7),
    "a kv head each": (Tiny(H=3, G=3, D=6, seed=4), O1, 0.7),
    "one head": (Tiny(H=1, G=1, D=10, seed=5), O1, 0.7),
    "biases of q, k, v": (Tiny(biases="qkv", qk_norm=False, seed=6), O1, 0.7),
    "a lone bias of k": (Tiny(biases="k", seed=7), O1, 0.7),
    "a lone bias of o": (Tiny(biases="o", seed=8), O1, 0.7),
    "biases of all four": (Tiny(biases="qkvo", tied=False, seed=9), O1, 0.7),
    "gemma norms": (Tiny(arch={"norm_style": "gemma"}, seed=10), O1, 0.7),
    "gemma norms, no qk-norm, eps": (
        Tiny(arch={"norm_style": "gemma", "rms_norm_eps": 1e-2}, qk_norm=False, seed=11),
        O1,
        0.7,
    ),
    "partial rotary": (Tiny(arch={"partial_rotary_factor": 0.5, "rope_theta": 500.0}, seed=12), O1, 0.7),
    "rotary floor": (Tiny(D=10, arch={"partial_rotary_factor": 0.1}, seed=13), O1, 0.7),
    "the deepest layer": (Tiny(seed=14), Conversion((2,), "deep1", 6, 5, 2, 20), 0.7),
    "every other layer": (Tiny(layers=4, seed=15), Conversion((0, 2), (0, 2), 6, 5, 2, 20), 0.7),
    "a middle layer": (Tiny(seed=16), Conversion((1,), (1,), 4, 1, 0, 11), 0.7),
    "one layer": (Tiny(layers=1, seed=17), Conversion((0,), "all", 6, 5, 2, 20), 0.7),
    "exact attention on both sides": (Tiny(seed=18), EXACT, 0.7),
    "seal at the last row": (Tiny(seed=19), Conversion((0, 1, 2), "all", 6, 5, 2, SEQ - 1), 0.7),
    "output gate, interleaved": (Tiny(gate="interleaved", arch={"partial_rotary_factor": 0.25}, seed=21), O1, 0.7),
    "output gate a head": (Tiny(gate="head", seed=22), O1, 0.7),
    "output gate a channel": (Tiny(gate="channel", biases="qkvo", seed=23), O1, 0.7),
    "other scale, multipliers, capped logits": (
        Tiny(
            arch={
                "query_pre_attn_scalar": 5.0,
                "embed_multiplier": 3.0,
                "logit_multiplier": 0.7,
                "final_logit_softcapping": 2.5,
            },
            seed=24,
        ),
        O1,
        0.7,
    ),
    "capped attention": (
        Tiny(arch={"attn_logit_softcapping": 1.5}, seed=25),
        dataclasses.replace(O1, polish_only=True),
        0.7,
    ),
    "sliding windows with angles of their own": (
        Tiny(
            layers=4,
            arch={
                "layer_types": ["SlidingAttention", "FullAttention"] * 2,
                "sliding_window": 7,
                "rope_local_base_freq": 100.0,
                "local_partial_rotary_factor": 0.5,
                "rope_freq_factors": [1.0, 1.5, 2.0, 4.0],
            },
            seed=26,
        ),
        Conversion((1, 3), (1, 3), 6, 5, 2, 20),
        0.7,
    ),
    "heads by layer": (Tiny(arch={"attention_heads_per_layer": [4, 2, 6]}, seed=27), O1, 0.7),
    "two loops": (Tiny(arch={"num_loops": 2}, seed=28), Conversion((1, 2), "deep2", 6, 5, 2, 20), 0.7),
    "three loops with a norm between": (Tiny(arch={"num_loops": 3, "loop_final_norm": True}, seed=29), O1, 0.7),
    "padded vocabulary": (Tiny(padding=3, seed=30), O1, 0.7),
    "padded vocabulary, untied": (Tiny(padding=3, tied=False, seed=31), O1, 0.7),
    "hybrid": (
        Tiny(layers=4, arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention"] * 2}, seed=32),
        Conversion((1, 3), "all", 6, 5, 2, 20),
        0.7,
    ),
    "hybrid, gemma, gated, all trained": (
        Tiny(
            layers=3,
            gate="interleaved",
            arch={
                **LINEAR,
                "layer_types": ["LinearAttention", "FullAttention", "LinearAttention"],
                "norm_style": "gemma",
            },
            seed=33,
        ),
        dataclasses.replace(O1, polish_only=True),
        0.7,
    ),
    "seal behind the last row": (Tiny(seed=20), Conversion((0, 1, 2), "all", 6, 5, 2, SEQ), 0.7),
}


def moved(replica: Replica, seed: int = 0) -> Replica:
    """Masters a step away from the frozen weights, so that teacher and student differ beyond the attention."""
    flat = replica.masters.flat
    noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed), dtype=flat.dtype)
    flat.add_(noise, alpha=0.02)
    return replica


def ids_and_targets(model: Tiny) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.random.default_rng(model.seed).integers(0, model.V, (BATCH, SEQ + 1)))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def oracle_options(model: Tiny, setting: Conversion) -> transformer.Options:
    """From the header itself, not from the plan under test."""
    kernel = {"m": setting.m, "w": setting.w, "sink": setting.sink, "seal": setting.seal}
    return transformer.Options(model.header()["arch"], setting.converted, **kernel)


def compare(model: Tiny, setting: Conversion, kl_weight: float) -> dict[str, float]:
    """Largest errors of ce, kl and each gradient, relative to the largest entry, and of the norm."""
    replica = moved(new_replica(in_f64(model.weights()), setting))
    ids, targets = ids_and_targets(model)
    replica.gradient.flat.fill_(torch.nan)
    loss = loss_and_gradient(replica, ids, targets, kl_weight)
    tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()}
    ce, kl, gradients = transformer.loss_and_gradients(
        tensors, replica.masters.named, oracle_options(model, setting), ids, targets, kl_weight
    )
    assert replica.gradient.named.keys() == gradients.keys()
    errors = {name: worst_error(replica.gradient.named[name], want) for name, want in gradients.items()}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    errors["norm"] = abs(gradient_norm(replica.gradient.flat) / norm - 1)
    errors["ce"], errors["kl"] = abs(loss.ce / ce - 1), abs(loss.kl - kl) / max(kl, 1e-6)
    return errors


@pytest.mark.parametrize(("model", "setting", "kl_weight"), MODELS.values(), ids=MODELS.keys())
def test_gradients_are_those_of_autograd(model: Tiny, setting: Conversion, kl_weight: float) -> None:
    errors = compare(model, setting, kl_weight)
    assert {name: error for name, error in errors.items() if not error < 1e-8} == {}


@pytest.mark.parametrize("setting", [O1, dataclasses.replace(O1, polish_only=True)], ids=["O(1)", "polish only"])
def test_a_separate_teacher_uses_its_own_norm_and_head(setting: Conversion) -> None:
    model, other = Tiny(tied=False, seed=40), Tiny(tied=False, F=20, seed=41)
    replica = moved(new_replica(in_f64(model.weights()), setting, in_f64(other.weights())))
    ids, targets = ids_and_targets(model)
    loss = loss_and_gradient(replica, ids, targets, 0.6)
    tensors, teacher = (
        {name: torch.from_numpy(array).double() for name, array in m.arrays().items()} for m in (model, other)
    )
    leaves = {name: t.detach().clone().requires_grad_() for name, t in replica.masters.named.items()}
    options = oracle_options(model, setting)
    rows = transformer.hidden({**tensors, **leaves}, options, ids, student=True)
    theirs = transformer.hidden(teacher, oracle_options(other, setting), ids, student=False)
    ce = options.loss(rows, tensors, targets.flatten()).mean()
    kl = loss_oracle.kl(rows, theirs, tensors["lm_head.weight"], teacher["lm_head.weight"]).mean()
    (0.4 * ce + 0.6 * kl).backward()
    assert loss.ce == pytest.approx(ce.item(), rel=1e-10)
    assert loss.kl == pytest.approx(kl.item(), rel=1e-10)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert worst_error(replica.gradient.named[name], leaf.grad) < 1e-8


@pytest.mark.parametrize("wrong", [{"w": 6}, {"sink": 1}, {"seal": 21}, {"seal": 33}, {"layers": (0, 1)}])
def test_another_kernel_has_other_gradients(wrong: dict[str, Any]) -> None:
    """The comparison sees a window, a sink, a seal, a landmark or a layer that is one off."""
    model = Tiny()
    replica = moved(new_replica(in_f64(model.weights()), O1))
    ids, targets = ids_and_targets(model)
    loss_and_gradient(replica, ids, targets, 0.7)
    tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()}
    options = oracle_options(model, dataclasses.replace(O1, **wrong))
    gradients = transformer.loss_and_gradients(tensors, replica.masters.named, options, ids, targets, 0.7)[2]
    assert max(worst_error(replica.gradient.named[name], want) for name, want in gradients.items()) > 1e-4


@pytest.mark.parametrize("name", ["GQA, qk-norm, tied", "biases of all four", "gemma norms", "partial rotary"])
def test_hidden_states_are_those_of_the_oracle(name: str) -> None:
    model, setting, _ = MODELS[name]
    replica = moved(new_replica(in_f64(model.weights()), setting))
    ids, _ = ids_and_targets(model)
    tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()}
    trained = {**tensors, **replica.masters.named}
    options = oracle_options(model, setting)
    exact = dataclasses.replace(options, converted=())
    teacher = hidden_states(replica, ids, student=False)
    assert worst_error(teacher, transformer.hidden(tensors, options, ids, student=False)) < 1e-12
    student = hidden_states(replica, ids, student=True, seal=setting.seal)
    assert worst_error(student, transformer.hidden(trained, options, ids, student=True)) < 1e-9
    unconverted = hidden_states(replica, ids, student=True)
    assert worst_error(unconverted, transformer.hidden(trained, exact, ids, student=True)) < 1e-12
    assert worst_error(student, unconverted) > 1e-3


def test_frozen_weights_and_masters_are_left_alone_and_the_gradient_is_overwritten() -> None:
    model = Tiny(biases="qkvo", tied=False)
    replica = moved(model.replica(dataclasses.replace(O1, layers=(1, 2), spec="deep2")))
    unchanged = Unchanged(*tensors_in(replica.weights), replica.masters.flat)
    ids, targets = ids_and_targets(model)
    loss_and_gradient(replica, ids, targets, 0.7)
    first = replica.gradient.flat.clone()
    loss_and_gradient(replica, ids, targets, 0.7)
    assert torch.equal(replica.gradient.flat, first)
    unchanged.check()


def test_masters_begin_as_the_files_weights_and_can_be_put_back() -> None:
    model = Tiny()
    replica = model.replica(dataclasses.replace(O1, layers=(0, 2), spec=(0, 2)))
    arrays = model.arrays()
    order = [name for i in (0, 2) for name in replica.weights.plan.layers[i].trainable]
    assert list(replica.masters.named) == order
    start = {name: torch.from_numpy(arrays[name]) for name in order}
    assert all(torch.equal(replica.masters.named[name], start[name]) for name in order)
    # The recipe's order is the flat buffer's order.
    assert torch.equal(replica.masters.flat, torch.cat([start[name].flatten() for name in order]))
    moved(replica)
    assert not any(torch.equal(replica.masters.named[name], start[name]) for name in order)
    reset_masters(replica)
    assert all(torch.equal(replica.masters.named[name], start[name]) for name in order)


def test_an_untrained_student_with_exact_attention_is_the_teacher() -> None:
    model = Tiny()
    replica = model.replica(EXACT)
    ids, targets = ids_and_targets(model)
    loss = loss_and_gradient(replica, ids, targets, 1.0)
    assert 0 <= loss.kl < 1e-7
    # The gradient of a KL at its minimum is zero; that of the cross-entropy is of the order of 1.
    assert replica.gradient.flat.abs().max() < 1e-5
    loss_and_gradient(replica, ids, targets, 0.0)
    assert replica.gradient.flat.abs().max() > 1e-2


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_perplexity_does_not_depend_on_how_windows_are_batched(batch: int) -> None:
    model = Tiny()
    replica = moved(new_replica(in_f64(model.weights()), O1))
    ids = np.random.default_rng(5).integers(0, model.V, 300)
    offsets = [0, 17, 40, 90, 101, 200, 258]
    together = perplexity_at(replica, ids, offsets, SEQ, len(offsets), student=True)
    assert perplexity_at(replica, ids, offsets, SEQ, batch, student=True) == pytest.approx(together, rel=1e-12)
    tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()} | dict(
        replica.masters.named
    )
    rows = torch.from_numpy(np.stack([ids[o : o + SEQ + 1] for o in offsets]))
    hidden = transformer.hidden(tensors, oracle_options(model, O1), rows[:, :-1], student=True)
    nll = oracle_options(model, O1).loss(hidden, tensors, rows[:, 1:].flatten())
    assert together == pytest.approx(nll.mean().exp().item(), rel=1e-9)


KERNELS = Path(cortiq_fcd.kernels.__file__).parent


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """How often each function of the kernels package is called, however its caller got hold of it."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).parent == KERNELS:
            counts[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def backward_kernels() -> set[str]:
    """Every public backward in the kernels package."""
    trees = [ast.parse(path.read_text("utf-8")) for path in KERNELS.glob("*.py")]
    names = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if "_bwd" in name and not name.startswith("_")}


# Of layers and gates that these models do not have.
OF_OTHER_MODELS = {"causal_conv_bwd", "delta_rule_bwd", "gated_delta_net_bwd", "l2norm_bwd", "sigmoid_gate_bwd"}


def test_every_backward_is_called_as_often_as_its_forward_needs() -> None:
    """4 layers, of which 1 and 3 are converted: the backward runs from layer 3 down to layer 1."""
    model = Tiny(layers=4)
    replica = model.replica(dataclasses.replace(O1, layers=(1, 3), spec=(1, 3)))
    ids, targets = ids_and_targets(model)
    counts = calls_of(lambda: loss_and_gradient(replica, ids, targets, 0.7))
    expected = {
        "ce_kl": 1,
        "o1_attention_bwd": 2,
        "far_field_bwd": 2,
        "segment_means_bwd": 2 * 2,  # of q and of k
        "causal_attention_bwd": 1 + 2,  # layer 2, and the prompt rows of layers 1 and 3
        "swiglu_bwd": 3,
        "rmsnorm_bwd": 3 * 4 + 1,  # two norms, q_norm and k_norm a layer, and the final norm
        "rope_bwd": 3 * 2,
        "linear_bwd_input": 3 * 4,  # down, gate and up, o, q and k and v
        "linear_bwd_weight": 2 * 2,  # down, gate and up of the trained layers
    }
    assert {name: counts[name] for name in expected} == expected
    assert backward_kernels() <= expected.keys() | OF_OTHER_MODELS, "a backward that this test does not know"
    assert not counts.keys() & OF_OTHER_MODELS
