"""Clipped gradients into torch.optim.AdamW."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(start: Tensor, gradients: list[Tensor], lr: float) -> tuple[Tensor, list[float]]:
    """The parameter after one step a gradient, and the norms before clipping."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    norms = []
    for gradient in gradients:
        norm = gradient.double().norm().item()
        parameter.grad = gradient * (1 / (norm + 1e-6)) if norm > 1 else gradient.clone()
        optimizer.step()
        norms.append(norm)
    return parameter.detach(), norms
