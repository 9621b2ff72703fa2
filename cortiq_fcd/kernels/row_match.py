"""Squared distance of rows to given ones, relative to the length of these.

    L = mean_n |y_n - t_n|^2 / max(|t_n|^2, tiny);   dy_n = 2 (y_n - t_n) / (N max(|t_n|^2, tiny))

y, t [N, C]; t gets no gradient. Every row counts alike, however long: a few rows of a transformer are a thousand times
longer than the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.widen import widened

TINY = 1e-30


@dataclass(frozen=True)
class Match:
    """The loss, no unit, and its gradient dy [N, C]."""

    loss: float
    dy: Tensor


def row_match(y: Tensor, target: Tensor) -> Match:
    """Loss and gradient for y and target [N, C]. Raises ValueError when the shapes don't meet, or without rows."""
    if y.dim() != 2 or y.shape != target.shape or not y.shape[0]:
        raise ValueError(f"row_match: y {tuple(y.shape)} and target {tuple(target.shape)} don't meet")
    wide, wide_target = widened(y), widened(target)
    lengths = torch.linalg.vecdot(wide_target, wide_target).clamp_min_(TINY)
    difference = wide - wide_target
    loss = (torch.linalg.vecdot(difference, difference) / lengths).mean(dtype=torch.float64)
    return Match(loss.item(), difference.mul_((2 / (y.shape[0] * lengths))[:, None]).to(y.dtype))
