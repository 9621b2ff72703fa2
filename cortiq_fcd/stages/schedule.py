"""How the learning rate moves over a run."""

from __future__ import annotations

import math

from cortiq_fcd.stages.config import TrainConfig

COSINE_END = 0.1  # share of the peak that a cosine ends at
TRAPEZOID_FALL = 0.2  # share of the steps over which a trapezoid falls


def rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, 1 to config.steps: the peak times how far it has risen and fallen."""
    risen = min(1.0, step / config.warmup) if config.warmup else 1.0
    return config.lr * risen * _fallen(config, step)


def _fallen(config: TrainConfig, step: int) -> float:
    if config.schedule == "cosine":
        done = min(1.0, max(0, step - config.warmup) / max(1, config.steps - config.warmup))
        return COSINE_END + (1 - COSINE_END) * (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "trapezoid":
        return min(1.0, (config.steps + 1 - step) / (TRAPEZOID_FALL * config.steps))
    return 1.0
