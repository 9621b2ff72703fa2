"""Rotary position embedding of the first r dimensions, half-split pairs (i, i + r / 2); theta^(-2i/r) is usual.

    y_i = x_i cos - x_{i+r/2} sin;   y_{i+r/2} = x_{i+r/2} cos + x_i sin;   angle = position * frequency_i

A rotation's transpose is the rotation by the negative angle, and that is the backward. Source: Su et al. 2021
(arXiv 2104.09864); the half-split pairing is that of the HuggingFace models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles, [T, r / 2] each."""

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, stop: int) -> Rotation:
        """The rotation of positions start to stop - 1."""
        return Rotation(self.cos[start:stop], self.sin[start:stop])


def rotation(positions: int, frequencies: Sequence[float], magnitude: float = 1.0, *, like: Tensor) -> Rotation:
    """Angles for positions 0 .. positions - 1, one frequency (radians a position) a pair of dimensions.

    Computed in f64 on the CPU, rounded once to `like`'s dtype and device. `magnitude` scales q and k (YaRN).
    """
    per_position = torch.tensor(frequencies, dtype=torch.float64)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * per_position
    return Rotation((angle.cos() * magnitude).to(like), (angle.sin() * magnitude).to(like))


def rope_fwd(x: Tensor, rotation: Rotation, *, out: Tensor | None = None) -> Tensor:
    """Rotate x [..., T, D] (any strides); contiguous unless `out` is given. Raises ValueError on shapes."""
    half = rotation.cos.shape[-1]
    if x.dim() < 2 or x.shape[-2] != rotation.cos.shape[0] or x.shape[-1] < 2 * half:
        raise ValueError(f"rope: x {tuple(x.shape)} and angles {tuple(rotation.cos.shape)} don't meet")
    y = x.new_empty(x.shape) if out is None else out
    low, high = x[..., :half], x[..., half : 2 * half]
    torch.mul(low, rotation.cos, out=y[..., :half]).addcmul_(high, rotation.sin, value=-1)
    torch.mul(high, rotation.cos, out=y[..., half : 2 * half]).addcmul_(low, rotation.sin)
    if x.shape[-1] > 2 * half:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


def rope_bwd(dy: Tensor, rotation: Rotation, *, out: Tensor | None = None) -> Tensor:
    """Gradient of rope_fwd: dy [..., T, D] turned back."""
    return rope_fwd(dy, Rotation(rotation.cos, -rotation.sin), out=out)
