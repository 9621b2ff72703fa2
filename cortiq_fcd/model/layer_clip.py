"""Clip the gradient of every layer by itself: a spike in one takes nothing from the others.

    g_l <- g_l / (sqrt(L) |g_l| + 1e-6)   where |g_l| > 1 / sqrt(L), for L trained layers

so that the whole is never longer than 1, as a clip of the whole would have it.
"""

from __future__ import annotations

import math

import torch

from cortiq_fcd.model.adamw import MAX_NORM, gradient_norm
from cortiq_fcd.model.replica import Replica


def clip_layers(replica: Replica) -> float:
    """Clip the replica's gradient in place; its norm afterwards."""
    layers = list(replica.gradient.layers.values())
    most = MAX_NORM / math.sqrt(len(layers))
    squares = 0.0
    for own in layers:
        norm = math.sqrt(sum(gradient_norm(part.view(-1)) ** 2 for part in own))
        if norm > most:
            scale = most / (norm + 1e-6)
            for part in own:
                torch.mul(part, scale, out=part)
            norm *= scale
        squares += norm**2
    return math.sqrt(squares)
