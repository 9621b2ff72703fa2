"""Root-mean-square layer norm over the last axis.

    inv = 1 / sqrt(mean(x^2) + eps);   y = x * inv * g,   g = w (qwen style) or 1 + w (gemma style)
    dx_j = inv * g_j * dy_j - x_j * inv^3 / C * sum_i(dy_i * g_i * x_i)
    dw_j = sum over rows of dy_j * x_j * inv            (the same for both styles)

x, y [N, C]; w [C]. Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """What the backward needs. inv [N, 1]; gain [C] is the factor that was applied (w or 1 + w)."""

    x: Tensor
    gain: Tensor
    inv: Tensor


@dataclass(frozen=True)
class Grads:
    """Gradients of the input [N, C] and of the stored weight [C]."""

    dx: Tensor
    dw: Tensor


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool) -> tuple[Tensor, Saved]:
    """Normalise the rows of x. `plus_one`: the gain is 1 + weight. Raises ValueError when the widths differ."""
    if x.dim() != 2 or weight.shape != x.shape[-1:]:
        raise ValueError(f"rmsnorm: x {tuple(x.shape)} and weight {tuple(weight.shape)} don't meet")
    gain = weight + 1 if plus_one else weight
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inv = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inv).mul_(gain), Saved(x, gain, inv)


def rmsnorm_bwd(dy: Tensor, saved: Saved) -> Grads:
    """Gradients of rmsnorm_fwd for dy [N, C]. Raises ValueError when dy has another shape."""
    if dy.shape != saved.x.shape:
        raise ValueError(f"rmsnorm: dy {tuple(dy.shape)} and x {tuple(saved.x.shape)} don't meet")
    x, gain, inv = saved.x, saved.gain, saved.inv
    # One product dy * x serves both sums: rows weighted by the gain, columns weighted by inv.
    product = dy * x
    coefficient = torch.mv(product, gain).unsqueeze_(-1).mul_(inv.pow(3)).div_(-x.shape[-1])
    dw = torch.mv(product.T, inv.squeeze(-1))
    dx = torch.mul(dy, gain, out=product).mul_(inv).addcmul_(x, coefficient)
    return Grads(dx, dw)
