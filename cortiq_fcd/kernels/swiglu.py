"""Gated activation of the feed-forward block.

    y = silu(gate) * up,   silu(z) = z * sigmoid(z)
    dup = dy * silu(gate);   dgate = dy * up * s * (1 + gate * (1 - s)),   s = sigmoid(gate)

All [N, F]; gate and up may be strided views of one [N, 2F] product. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of a tensor worked on at a time: the temporaries of all passes over them stay in a core's cache.
BLOCK = 1 << 17


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
    y = gate.new_empty(gate.shape)
    for rows in _blocks(y):
        torch.sigmoid(gate[rows], out=y[rows]).mul_(gate[rows]).mul_(up[rows])
    return y, Saved(gate, up)


def swiglu_bwd(dy: Tensor, saved: Saved) -> Grads:
    """Gradients of swiglu_fwd for dy [N, F]. Raises ValueError when dy has another shape."""
    gate, up = saved.gate, saved.up
    if dy.shape != gate.shape:
        raise ValueError(f"swiglu: dy {tuple(dy.shape)} and gate {tuple(gate.shape)} don't meet")
    N, width = dy.shape
    dgate_up = dy.new_empty(N, 2 * width)
    dgate, dup = dgate_up[:, :width], dgate_up[:, width:]
    for rows in _blocks(dy):
        sigmoid = torch.sigmoid(gate[rows])
        silu = sigmoid * gate[rows]
        torch.mul(dy[rows], silu, out=dup[rows])
        # s (1 + z (1 - s)) = s + silu - s silu
        slope = silu.addcmul(sigmoid, silu, value=-1).add_(sigmoid)
        torch.mul(dy[rows], up[rows], out=dgate[rows]).mul_(slope)
    return Grads(dgate, dup, dgate_up)


def _blocks(x: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // max(1, x.shape[1]))
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))
