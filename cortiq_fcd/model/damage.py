"""What the O(1) kernel costs before any training: KL to exact attention at the positions where it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cortiq_fcd.kernels.ce_kl import kl_sum, nll_sum
from cortiq_fcd.model.layer import embed
from cortiq_fcd.model.replica import Replica, head_rows, hidden_states, run_visits, visits


def damage_by_layer(replica: Replica, ids: Tensor, layers: Iterable[int]) -> dict[int, float]:
    """Mean KL(exact || that one layer converted) over windows ids [B, T], in nats a position after the seal.

    Masters play no part. What runs before the first visit of a layer is exact, and run once for all layers.
    """
    weights, seal = replica.weights, replica.conversion.seal
    o1 = replica.o1(seal, ids.shape[1])
    order = list(visits(weights.plan))
    at, x = 0, embed(ids, weights.embed, weights.plan.embed_multiplier)
    exact = head_rows(_tail(run_visits(x, weights, order, ids, None, ()), seal, ids), weights)
    found = {}
    for layer in sorted(layers):
        first = order.index(layer)
        x = run_visits(x, weights, order[at:first], ids, None, ())
        at = first
        rows = head_rows(_tail(run_visits(x, weights, order[first:], ids, o1, (layer,)), seal, ids), weights)
        found[layer] = kl_to_exact(rows, exact, replica) / rows.shape[0]
    return found


def tail_rows(replica: Replica, batches: Sequence[Tensor], *, exact: bool) -> list[Tensor]:
    """What the head multiplies, [B * (T - seal), C], at the positions from the seal on of each ids [B, T]: through
    exact attention, or with all of the conversion's layers converted.
    """
    seal = replica.conversion.seal
    return [
        _tail(hidden_states(replica, ids, student=True, seal=None if exact else seal), seal, ids) for ids in batches
    ]


def nll(rows: Tensor, targets: Tensor, replica: Replica) -> float:
    """Sum of -log p(target), in nats, over rows [N, C] and the targets [B, T] of their windows."""
    weights, tail = replica.weights, targets[:, replica.conversion.seal :].reshape(-1)
    return nll_sum(rows, weights.head, tail, softcap=weights.plan.logit_softcap)


def kl_to_exact(rows: Tensor, exact: Tensor, replica: Replica) -> float:
    """Sum of KL(exact || rows), in nats; rows and exact [N, C] are what the head multiplies."""
    cap = replica.weights.plan.logit_softcap
    return kl_sum(rows, exact, replica.weights.head, softcap=cap, teacher_softcap=cap)


def _tail(rows: Tensor, seal: int, ids: Tensor) -> Tensor:
    return torch.unflatten(rows, 0, ids.shape)[:, seal:].flatten(0, 1)
