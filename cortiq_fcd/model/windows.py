"""Which tokens are trained on and which validate: SplitMix64 windows, and evenly spaced ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
_MASK = (1 << 64) - 1
QUICK_ROUNDS = 2
FINAL_ROUNDS = 6


@dataclass
class SplitMix64:
    """The 64-bit generator of Steele, Lea and Flood 2014; its whole state is one integer."""

    state: int

    def next_u64(self) -> int:
        """The next number, 0 to 2^64 - 1."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


def training_offsets(generator: SplitMix64, tokens: int, seq: int, batch: int) -> list[int]:
    """Offsets of the next `batch` training windows of `seq` tokens in a text of `tokens`."""
    return [generator.next_u64() % (tokens - seq - 1) for _ in range(batch)]


def offsets_once(seed: int, first: int, tokens: int, seq: int, batch: int) -> list[int]:
    """Offsets of training windows `first` .. `first` + batch - 1 of a run that uses no token twice before all of them.

    Windows lie side by side and are shuffled anew for every pass over the text, which begins at another token.
    """
    count = max(1, (tokens - 1) // seq - 1)  # so that every beginning leaves room for all
    found = []
    for number in range(first, first + batch):
        begin, order = _pass_over(seed, number // count, count, tokens - 1 - count * seq)
        found.append(begin + order[number % count] * seq)
    return found


@functools.lru_cache(maxsize=2)
def _pass_over(seed: int, number: int, count: int, most: int) -> tuple[int, list[int]]:
    """Where a pass over the text begins, and the order of its windows (Fisher and Yates)."""
    generator = SplitMix64((seed + number * 0x9E3779B97F4A7C15) & _MASK)
    begin, order = generator.next_u64() % max(1, most), list(range(count))
    for last in range(count - 1, 0, -1):
        other = generator.next_u64() % (last + 1)
        order[last], order[other] = order[other], order[last]
    return begin, order


def validation_offsets(tokens: int, seq: int, count: int) -> list[int]:
    """Offsets of `count` validation windows, spread over a text of `tokens`."""
    stride = max(1, (tokens - seq - 1) // count)
    return [min(i * stride, tokens - seq - 1) for i in range(count)]


def windows(ids: Ids, offsets: list[int], seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token windows [B, seq] and their targets (shifted by one), int64."""
    rows = torch.from_numpy(np.stack([ids[o : o + seq + 1] for o in offsets])).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def measured_spans(tokens: int, seq: int, batch: int) -> list[tuple[int, int]]:
    """Where the quick and the six-round validation windows lie, [start, stop) with the last target."""
    rounds = (QUICK_ROUNDS, FINAL_ROUNDS)
    return [(o, o + seq + 1) for r in rounds for o in validation_offsets(tokens, seq, r * batch)]


def free_offsets(tokens: int, taken: Iterable[tuple[int, int]], length: int) -> list[int]:
    """Offsets of windows of `length` tokens, side by side, that touch neither one another nor what is taken."""
    free: list[int] = []
    at = 0
    for start, stop in [*sorted(taken), (tokens, tokens)]:
        free += range(at, start - length + 1, length)
        at = max(at, stop)
    return free
