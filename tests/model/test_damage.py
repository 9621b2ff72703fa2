"""What a conversion costs: of one layer at a time, and without a far field, held against the oracles."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cortiq_fcd.model.attention import Angles, AttentionWeights, O1Attention, attention_fwd, project, project_out
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.damage import damage_by_layer, tail_rows
from cortiq_fcd.model.replica import hidden_states, new_replica, rotations
from cortiq_fcd.model.untrained import untrained
from tests.fixtures import Tiny, in_f64
from tests.model.test_gradients import O1, ids_and_targets
from tests.oracles import loss
from tests.oracles.compare import worst_error


@pytest.mark.parametrize(
    "model",
    [
        Tiny(),
        Tiny(arch={"num_loops": 2, "loop_final_norm": True}),
        Tiny(arch={"final_logit_softcapping": 2.5, "logit_multiplier": 0.7}),
    ],
    ids=["plain", "two loops", "capped"],
)
def test_each_layer_alone_is_the_conversion_of_that_layer(model: Tiny) -> None:
    weights, (ids, _) = in_f64(model.weights()), ids_and_targets(model)
    found = damage_by_layer(untrained(weights, O1), ids, (2, 0))
    assert list(found) == [0, 2]
    for layer, nats in found.items():
        alone = new_replica(weights, dataclasses.replace(O1, layers=(layer,), spec=(layer,)))
        rows = [
            torch.unflatten(hidden_states(alone, ids, student=True, seal=seal), 0, ids.shape)[:, O1.seal :].flatten(
                0, 1
            )
            for seal in (O1.seal, None)
        ]
        cap = model.arch.get("final_logit_softcapping")
        want = loss.kl(*rows, weights.head, softcap=cap, teacher_softcap=cap).mean().item()
        assert nats == pytest.approx(want, rel=1e-8)
        assert nats > 1e-5


def test_no_landmarks_are_a_window_and_sinks_alone() -> None:
    model = Tiny(layers=1)
    weights, (ids, _) = in_f64(model.weights()), ids_and_targets(model)
    layer = weights.layers[0]
    assert isinstance(layer.mixer, AttentionWeights)
    n = torch.randn(ids.numel(), model.C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = rotations(weights, ids.shape[1])
    got, _ = attention_fwd(n, layer.mixer, angles, ids.shape[0], O1Attention(20, 0, 5, 2))
    T = ids.shape[1]
    rows = torch.unflatten(n, 0, ids.shape)
    t, j = torch.arange(T)[:, None], torch.arange(T)
    near = (j <= t) & ((t - j < 5) | (j < 2) | (t < 20))
    want = masked_attention(rows, layer.mixer, near, angles)
    assert worst_error(torch.unflatten(got, 0, ids.shape), want) < 1e-10


def masked_attention(rows: Tensor, weights: AttentionWeights, near: Tensor, angles: Angles) -> Tensor:
    heads = project(rows.flatten(0, 1), weights, angles, rows.shape[0])
    logits = heads.q @ heads.k[:, :, None].mT * weights.plan.scale
    out = torch.softmax(logits.masked_fill(~near, -torch.inf), -1) @ heads.v[:, :, None]
    return torch.unflatten(project_out(out, heads.gate, weights)[0], 0, rows.shape[:2])


def test_the_tail_is_what_comes_after_the_seal() -> None:
    model = Tiny()
    replica = untrained(model.weights(), O1)
    ids, _ = ids_and_targets(model)
    for exact in (True, False):
        whole = hidden_states(replica, ids, student=True, seal=None if exact else O1.seal)
        want = torch.unflatten(whole, 0, ids.shape)[:, O1.seal :].flatten(0, 1)
        got = torch.cat(tail_rows(replica, [ids[:1], ids[1:]], exact=exact))
        assert worst_error(got, want) < 1e-5


def test_a_conversion_without_layers_costs_nothing() -> None:
    model = Tiny()
    nothing = Conversion((0,), (0,), 6, 5, 2, 41)  # sealed at the end of the window: exact throughout
    replica = untrained(in_f64(model.weights()), dataclasses.replace(nothing, seal=40, w=40))
    ids, _ = ids_and_targets(model)
    assert damage_by_layer(replica, ids, (0,)) == {0: 0.0}
