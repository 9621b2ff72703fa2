"""RMSNorm from its definition."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    x_hat = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return x_hat * (1 + weight) if plus_one else x_hat * weight
