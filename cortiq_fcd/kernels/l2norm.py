"""Scaling of the last axis to Euclidean length `length`.

inv = length / sqrt(sum x^2 + eps);   y = x inv
dx = inv (dy - x (x . dy) / (sum x^2 + eps))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.widen import widened


@dataclass(frozen=True)
class Saved:
    """The input [..., D], sum x^2 + eps and inv, [..., 1] each."""

    x: Tensor
    square: Tensor
    inv: Tensor
    dtype: torch.dtype  # of the input


def l2norm_fwd(x: Tensor, eps: float, length: float = 1.0) -> tuple[Tensor, Saved]:
    """x / sqrt(sum x^2 + eps) * length over the last axis of x [..., D]."""
    dtype, x = x.dtype, widened(x)
    square = torch.linalg.vecdot(x, x).unsqueeze_(-1).add_(eps)
    inv = square.rsqrt().mul_(length)
    return (x * inv).to(dtype), Saved(x, square, inv, dtype)


def l2norm_bwd(dy: Tensor, saved: Saved) -> Tensor:
    """dx for dy, both [..., D]. Raises ValueError when dy has another shape."""
    if dy.shape != saved.x.shape:
        raise ValueError(f"l2norm: dy {tuple(dy.shape)} and x {tuple(saved.x.shape)} don't meet")
    dy = widened(dy)
    along = torch.linalg.vecdot(saved.x, dy).unsqueeze_(-1).div_(saved.square)
    return torch.addcmul(dy, saved.x, along, value=-1).mul_(saved.inv).to(saved.dtype)
