"""A moving average of the masters: what a constant learning rate leaves of noise in the last steps averages out."""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_fcd.model.adamw import SLICE


class Average:
    """mean <- mean + (1 - decay) (masters - mean), and the plain mean of the first 1 / (1 - decay) steps."""

    def __init__(self, masters: Tensor, decay: float, mean: Tensor | None = None, steps: int = 0) -> None:
        """`mean` after `steps` steps: to go on with."""
        self.mean = torch.zeros_like(masters) if mean is None else mean
        self._masters, self._decay, self._steps = masters, decay, steps

    def add(self) -> None:
        """Take the present masters in."""
        self._steps += 1
        weight = max(1 - self._decay, 1 / self._steps)
        for mean, masters in self._slices():
            mean.lerp_(masters, weight)

    def swap(self) -> None:
        """Put the average where the masters are, and them in its place; once more undoes it."""
        for mean, masters in self._slices():
            kept = masters.clone()
            masters.copy_(mean)
            mean.copy_(kept)

    def _slices(self) -> zip[tuple[Tensor, Tensor]]:
        return zip(torch.split(self.mean, SLICE), torch.split(self._masters, SLICE), strict=True)
