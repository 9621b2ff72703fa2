"""Stage 2: teacher and student over the frozen weights."""

from __future__ import annotations

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.replica import Replica, new_replica
from cortiq_fcd.model.weights import FrozenWeights


def run(
    conversion: Conversion,
    weights: FrozenWeights,
    teacher: FrozenWeights | None = None,
    ranks: Ranks = ALONE,
    recomputed: frozenset[int] = frozenset(),
    *,
    shard_optimizer: bool = False,
) -> Replica:
    """A replica whose trainable tensors start as the file's. `teacher` null: the file itself, with exact attention.

    `recomputed`: layers whose activations are computed again in the backward instead of kept. `shard_optimizer`: the
    replica's masters are copies.
    """
    return new_replica(weights, conversion, teacher, recomputed, parts=ranks.world, in_place=shard_optimizer)
