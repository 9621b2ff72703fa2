"""A replica that is only read: no masters and no gradient, so that a model takes the memory of its weights alone."""

from __future__ import annotations

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.replica import Masters, Replica
from cortiq_fcd.model.weights import FrozenWeights


def untrained(weights: FrozenWeights, conversion: Conversion) -> Replica:
    """Student and teacher over the same frozen weights; the student's converted layers run the O(1) kernel."""
    empty = weights.embed.new_empty(0)
    nothing = Masters(empty, empty, {}, {})
    return Replica(weights, weights, conversion, nothing, nothing)
