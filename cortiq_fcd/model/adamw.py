"""AdamW over one flat buffer, with the global gradient norm clipped first.

    scale = 1 / (norm + 1e-6) when norm > 1;   g <- g scale
    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    p <- p (1 - lr decay);   p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); eps as in the common libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BETA1, BETA2 = 0.9, 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
# Elements worked on at a time: parameter, gradient, both moments and a temporary of this size stay in cache.
SLICE = 1 << 18


@dataclass
class Moments:
    """Optimizer state: both moments [P] and the number of steps taken."""

    first: Tensor
    second: Tensor
    steps: int = 0

    def pieces(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Both moments, to be updated in place."""
        yield self.first, self.second


class AnyMoments(Protocol):
    """Moments, wherever they are."""

    steps: int

    def pieces(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of both moments on a device, from the first element to the last, to be updated in place."""


def new_moments(parameters: Tensor) -> Moments:
    """Zero moments for flat parameters [P]."""
    return Moments(torch.zeros_like(parameters), torch.zeros_like(parameters))


def gradient_norm(gradient: Tensor) -> float:
    """Euclidean norm of the flat gradient [P]; slices are summed in f64."""
    return math.sqrt(sum_of_squares(gradient))


def sum_of_squares(gradient: Tensor) -> float:
    """The square of `gradient_norm`."""
    return sum(torch.dot(part, part).item() for part in torch.split(gradient, SLICE))


def adamw_step(parameters: Tensor, gradient: Tensor, moments: AnyMoments, lr: float, norm: float) -> None:
    """Update parameters [P] and moments in place from gradient [P], whose norm (before clipping) is `norm`."""
    moments.steps += 1
    clip = 1 / (norm + 1e-6) if norm > MAX_NORM else 1.0
    # The correction of the second moment is taken out of the root and into the step, which saves a pass.
    root_correction = math.sqrt(1 - BETA2**moments.steps)
    step_size = lr * root_correction / (1 - BETA1**moments.steps)
    room = torch.empty_like(parameters[:SLICE])
    for p, g, first, second in _slices(parameters, gradient, moments):
        first.mul_(BETA1).add_(g, alpha=(1 - BETA1) * clip)
        second.mul_(BETA2).addcmul_(g, g, value=(1 - BETA2) * clip**2)
        denominator = torch.sqrt(second, out=room[: len(p)]).add_(EPS * root_correction)
        p.mul_(1 - lr * WEIGHT_DECAY).addcdiv_(first, denominator, value=-step_size)


def _slices(parameters: Tensor, gradient: Tensor, moments: AnyMoments) -> Iterator[tuple[Tensor, ...]]:
    at = 0
    for first, second in moments.pieces(parameters.device):
        piece = slice(at, at := at + len(first))
        whole = (parameters[piece], gradient[piece], first, second)
        yield from zip(*(torch.split(t, SLICE) for t in whole), strict=True)
