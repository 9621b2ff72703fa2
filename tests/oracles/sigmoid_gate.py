"""x times the logistic function of g."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(x: Tensor, g: Tensor) -> Tensor:
    return x / (1 + torch.exp(-g))
