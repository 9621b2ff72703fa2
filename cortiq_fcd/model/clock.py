"""Where the time of a step goes.

On an accelerator work is only queued here; the phase that first needs a number (the head's losses) waits for all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal[
    "sampling", "shared", "teacher", "student", "head", "recompute", "backprop", "optimizer", "validation", "checkpoint"
]


class Clock:
    """Seconds spent in each phase so far, in the order in which they first came."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count what runs inside. A phase inside another counts for itself alone."""
        before = sum(self.seconds.values())
        began = time.perf_counter()
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - before
            own = time.perf_counter() - began - inner
            self.seconds[phase] = self.seconds.get(phase, 0.0) + own
