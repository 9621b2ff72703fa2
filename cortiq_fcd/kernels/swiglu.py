"""Gated activation of the feed-forward block.

    y = silu(gate) * up,   silu(z) = z * sigmoid(z)
    dup = dy * silu(gate);   dgate = dy * up * s * (1 + gate * (1 - s)),   s = sigmoid(gate)

All [N, F]; gate and up may be strided views of one [N, 2F] product. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """The two inputs; the sigmoid is cheaper to recompute than to keep."""

    gate: Tensor
    up: Tensor


@dataclass(frozen=True)
class Grads:
    """dgate and dup [N, F], as two views of one [N, 2F] tensor, which is what the fused projection's backward takes."""

    dgate: Tensor
    dup: Tensor
    dgate_up: Tensor


def swiglu_fwd(gate: Tensor, up: Tensor) -> tuple[Tensor, Saved]:
    """silu(gate) * up. Raises ValueError when the shapes differ."""
    if gate.shape != up.shape or gate.dim() != 2:
        raise ValueError(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} don't meet")
    return torch.sigmoid(gate).mul_(gate).mul_(up), Saved(gate, up)


def swiglu_bwd(dy: Tensor, saved: Saved) -> Grads:
    """Gradients of swiglu_fwd for dy [N, F]. Raises ValueError when dy has another shape."""
    gate, up = saved.gate, saved.up
    if dy.shape != gate.shape:
        raise ValueError(f"swiglu: dy {tuple(dy.shape)} and gate {tuple(gate.shape)} don't meet")
    rows, width = dy.shape
    dgate_up = dy.new_empty(rows, 2 * width)
    dgate, dup = dgate_up[:, :width], dgate_up[:, width:]
    sigmoid = torch.sigmoid(gate)
    silu = sigmoid * gate
    torch.mul(dy, silu, out=dup)
    # s (1 + z (1 - s)) = s + silu - s silu
    slope = silu.addcmul(sigmoid, silu, value=-1).add_(sigmoid)
    torch.mul(dy, up, out=dgate).mul_(slope)
    return Grads(dgate, dup, dgate_up)
