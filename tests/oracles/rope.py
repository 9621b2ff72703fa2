"""Rotary embedding as complex multiplication of the half-split pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, rotary_dim: int, theta: float, first_position: int = 0) -> Tensor:
    half = rotary_dim // 2
    position = torch.arange(first_position, first_position + x.shape[-2], dtype=torch.float64)[:, None]
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
    turned = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., rotary_dim:]), -1)
