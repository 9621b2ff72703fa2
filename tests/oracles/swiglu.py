"""silu(gate) * up from its definition."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up
