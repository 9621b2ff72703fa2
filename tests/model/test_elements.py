"""What recipes add to a step, held against torch.autograd in f64: temperature, matching, gain limit, another seal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.elements import Elements, StepLoss
from cortiq_fcd.model.replica import Replica, loss_and_gradient, new_replica
from tests.fixtures import LINEAR, Tiny, in_f64
from tests.model.test_gradients import O1, ids_and_targets, moved, oracle_options
from tests.oracles import attention, transformer
from tests.oracles.compare import worst_error
from tests.oracles.row_match import row_match

KL = 0.7


def step(model: Tiny, setting: Conversion, elements: Elements) -> tuple[Replica, StepLoss]:
    replica = moved(new_replica(in_f64(model.weights()), setting))
    ids, targets = ids_and_targets(model)
    replica.gradient.flat.fill_(torch.nan)
    return replica, loss_and_gradient(replica, ids, targets, KL, elements=elements)


def oracle(model: Tiny, setting: Conversion, replica: Replica, elements: Elements) -> tuple[Any, dict[str, Tensor]]:
    """Losses and gradients with every output of a layer in sight."""
    ids, targets = ids_and_targets(model)
    tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in replica.masters.named.items()}
    options = oracle_options(model, setting)
    kept: dict[bool, list[Tensor]] = {True: [], False: []}
    rows = {}
    for student in (True, False):
        outputs, layer = kept[student], transformer.layer

        def watched(*args: Any, into: list[Tensor] = outputs, run: Any = layer, **kwargs: Any) -> Tensor:
            into.append(run(*args, **kwargs))
            return into[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer, "layer", watched)
            weights = {**tensors, **leaves} if student else tensors
            rows[student] = transformer.hidden(weights, options, ids, student=student)
    ce = options.loss(rows[True], tensors, targets.flatten()).mean()
    head, T = options.head(tensors), elements.temperature
    logs = [torch.log_softmax(rows[s] @ head.T / T, -1) for s in (True, False)]
    kl = (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean() * T**2
    layers = model.layers
    distances = [
        row_match(y.flatten(0, 1), t.detach().flatten(0, 1))
        for visit, (y, t) in enumerate(zip(kept[True], kept[False], strict=True))
        if visit % layers in setting.layers
    ]
    match = torch.stack(distances).mean()
    ((1 - KL) * ce + KL * kl + elements.match * match).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return (ce.item(), kl.item(), match.item()), gradients


@pytest.mark.parametrize(
    ("model", "setting", "elements"),
    [
        (Tiny(), O1, Elements(match=0.3)),
        (Tiny(layers=4), Conversion((1, 2), (1, 2), 6, 5, 2, 20), Elements(match=2.0)),
        (Tiny(arch={"num_loops": 2}, seed=28), O1, Elements(match=0.3)),
        (
            Tiny(layers=4, arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention"] * 2}, seed=32),
            Conversion((1, 3), "all", 6, 5, 2, 20),
            Elements(match=0.3),
        ),
        (Tiny(), dataclasses.replace(O1, polish_only=True), Elements(match=0.3)),
        (Tiny(), O1, Elements(temperature=2.0)),
        (Tiny(tied=False), O1, Elements(temperature=0.5, match=0.1)),
    ],
    ids=["match", "inner layers", "loops", "hybrid", "polish only", "temperature", "both"],
)
def test_matching_and_temperature(model: Tiny, setting: Conversion, elements: Elements) -> None:
    replica, loss = step(model, setting, elements)
    (ce, kl, match), gradients = oracle(model, setting, replica, elements)
    assert loss.ce == pytest.approx(ce, rel=1e-10)
    assert loss.kl == pytest.approx(kl, rel=1e-8)
    if elements.match:
        assert loss.match == pytest.approx(match, rel=1e-8)
    for name, want in gradients.items():
        assert worst_error(replica.gradient.named[name], want) < 1e-8, name


def test_activations_that_are_computed_again_change_nothing() -> None:
    model, elements = Tiny(), Elements(match=0.3, gain_limit=0.9)
    kept, loss = step(model, O1, elements)
    ids, targets = ids_and_targets(model)
    again = moved(new_replica(in_f64(model.weights()), O1, recomputed=frozenset({0, 1})))
    assert loss_and_gradient(again, ids, targets, KL, elements=elements) == loss
    assert torch.equal(again.gradient.flat, kept.gradient.flat)


def test_another_seal_is_another_conversion() -> None:
    model = Tiny()
    for seal in (17, 29):
        replica, loss = step(model, O1, Elements(seal=seal))
        there, wanted = step(model, dataclasses.replace(O1, seal=seal), Elements())
        assert loss == wanted
        assert torch.equal(replica.gradient.flat, there.gradient.flat)
    assert loss != step(model, O1, Elements())[1]


def test_a_separate_teacher_is_matched_layer_by_layer() -> None:
    model, other = Tiny(seed=40), Tiny(F=20, seed=41)
    setting = Conversion((1, 2), "deep2", 6, 5, 2, 20)
    replica = moved(new_replica(in_f64(model.weights()), setting, in_f64(other.weights())))
    ids, targets = ids_and_targets(model)
    loss = loss_and_gradient(replica, ids, targets, KL, elements=Elements(match=1.0))
    outputs: list[list[Tensor]] = [[], []]
    for into, own, student in ((outputs[0], model, True), (outputs[1], other, False)):
        tensors = {name: torch.from_numpy(array).double() for name, array in own.arrays().items()}
        tensors |= dict(replica.masters.named) if student else {}
        with pytest.MonkeyPatch.context() as patch:
            layer = transformer.layer
            patch.setattr(
                transformer, "layer", lambda *a, into=into, layer=layer, **k: into.append(layer(*a, **k)) or into[-1]
            )
            transformer.hidden(tensors, oracle_options(own, setting), ids, student=student)
    want = [row_match(outputs[0][i].flatten(0, 1), outputs[1][i].flatten(0, 1)).item() for i in (1, 2)]
    assert loss.match == pytest.approx(sum(want) / 2, rel=1e-8)


# Rows that amplify


def gains(model: Tiny, replica: Replica) -> Tensor:
    """Of every row behind the seal of every layer, [layers, B, G, R, T - seal], from the definition."""
    ids, _ = ids_and_targets(model)
    found: list[Tensor] = []
    joint = attention.o1_attention
    with pytest.MonkeyPatch.context() as patch:

        def watched(q: Tensor, k: Tensor, v: Tensor, M: Tensor, **geometry: Any) -> Any:
            result = joint(q, k, v, M, **geometry)
            longest = v.norm(dim=-1).amax(-1)[:, :, None, None]
            found.append((result.out.norm(dim=-1) / longest)[..., geometry["seal"] :])
            return result

        patch.setattr(attention, "o1_attention", watched)
        tensors = {name: torch.from_numpy(array).double() for name, array in model.arrays().items()}
        weights = {**tensors, **replica.masters.named}
        transformer.hidden(weights, oracle_options(model, O1), ids, student=True)
    return torch.stack(found)


WILD = Tiny(seed=3)


def test_wild_rows_are_counted() -> None:
    replica, loss = step(WILD, O1, Elements())
    found = gains(WILD, replica)
    assert loss.wild_rows == int((found > 1).sum())
    # The least gain at which a row counts is not left to rounding.
    assert (found - 1).abs().min() > 1e-6


def test_rows_above_the_limit_give_no_gradient_and_the_same_loss() -> None:
    plain, loss = step(WILD, O1, Elements())
    limit = gains(WILD, plain).flatten().sort(descending=True).values[9].item() * 0.9999
    limited, same = step(WILD, O1, Elements(gain_limit=limit))
    assert same == loss
    assert worst_error(limited.gradient.flat, plain.gradient.flat) > 1e-4

    ids, targets = ids_and_targets(WILD)
    tensors = {name: torch.from_numpy(array).double() for name, array in WILD.arrays().items()}
    joint = attention.o1_attention
    with pytest.MonkeyPatch.context() as patch:

        def stopped(q: Tensor, k: Tensor, v: Tensor, M: Tensor, **geometry: Any) -> Any:
            result = joint(q, k, v, M, **geometry)
            longest = v.norm(dim=-1).amax(-1)[:, :, None, None]
            wild = result.out.norm(dim=-1) / longest > limit
            wild[..., : geometry["seal"]] = False
            result.out = torch.where(wild[..., None], result.out.detach(), result.out)
            return result

        patch.setattr(attention, "o1_attention", stopped)
        _, _, wanted = transformer.loss_and_gradients(
            tensors, limited.masters.named, oracle_options(WILD, O1), ids, targets, KL
        )
    for name, want in wanted.items():
        assert worst_error(limited.gradient.named[name], want) < 1e-8, name


def test_no_limit_is_no_limit() -> None:
    plain, _ = step(WILD, O1, Elements())
    unlimited, _ = step(WILD, O1, Elements(gain_limit=math.inf))
    huge, _ = step(WILD, O1, Elements(gain_limit=1e9))
    assert torch.equal(plain.gradient.flat, unlimited.gradient.flat)
    assert torch.equal(plain.gradient.flat, huge.gradient.flat)
