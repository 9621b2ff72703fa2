"""Layers whose forward keeps only its input: the backward runs it again. Same operations, so the same bits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cortiq_fcd.model.attention import Angles, O1Attention
from cortiq_fcd.model.layer import LayerSaved, LayerWeights, layer_saved


@dataclass(frozen=True)
class Recomputed:
    """The input [N, C] of a layer, and how it ran."""

    x: Tensor
    batch: int
    o1: O1Attention | None

    def saved(self, weights: LayerWeights, angles: Angles) -> LayerSaved:
        """What the layer's backward needs."""
        return layer_saved(self.x, weights, angles, self.batch, self.o1)
