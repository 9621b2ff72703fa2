"""Relative squared distance of rows, by autograd-able operations."""

from __future__ import annotations

from torch import Tensor


def row_match(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum(-1).div((target**2).sum(-1)).mean()
