"""Output gate of attention heads.

    y = x * s,  s = sigmoid(g);   dx = dy * s;   dg = dy * x * s (1 - s), summed where g was broadcast

x, y [..., D]; g [..., D] (a gate a channel) or [..., 1] (a gate a head).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """The input and sigmoid(g)."""

    x: Tensor
    sigmoid: Tensor


@dataclass(frozen=True)
class Grads:
    """Gradients with the shapes of x and g."""

    dx: Tensor
    dg: Tensor


def sigmoid_gate_fwd(x: Tensor, g: Tensor) -> tuple[Tensor, Saved]:
    """x * sigmoid(g). Raises ValueError when the shapes don't meet."""
    if g.shape[:-1] != x.shape[:-1] or g.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(f"sigmoid_gate: x {tuple(x.shape)} and gate {tuple(g.shape)} don't meet")
    sigmoid = torch.sigmoid(g)
    return x * sigmoid, Saved(x, sigmoid)


def sigmoid_gate_bwd(dy: Tensor, saved: Saved) -> Grads:
    """Gradients of sigmoid_gate_fwd for dy [..., D]. Raises ValueError when dy has another shape."""
    if dy.shape != saved.x.shape:
        raise ValueError(f"sigmoid_gate: dy {tuple(dy.shape)} and x {tuple(saved.x.shape)} don't meet")
    along = dy * saved.x
    if saved.sigmoid.shape[-1] == 1 != along.shape[-1]:
        along = along.sum(-1, keepdim=True)
    return Grads(dy * saved.sigmoid, along.mul_(saved.sigmoid).mul_(1 - saved.sigmoid))
