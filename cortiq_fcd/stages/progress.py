"""Stages and warnings on their way to the listener, remembered for the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from cortiq_fcd.events import Event, Listener, StageEvent, WarningEvent
from cortiq_fcd.io.paths import printable

StageName = Literal["dequantize", "replica", "gate", "polish", "evaluate", "provenance"]


class Progress:
    """Tells the listener about stages and warnings, and remembers both for the report."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.timing: dict[str, float] = {}
        self.notes: list[str] = []

    @contextmanager
    def stage(self, name: StageName, detail: str) -> Iterator[None]:
        """A stage, timed; entering the same one again adds up."""
        self._listener(StageEvent(stage=name, detail=detail))
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.timing[name] = self.timing.get(name, 0.0) + seconds
        self._listener(StageEvent(stage=name, detail=detail, seconds=seconds))

    def move(self, giver: StageName, taker: StageName, seconds: float) -> None:
        """Count time that was spent inside one stage for another."""
        self.timing[giver] -= seconds
        self.timing[taker] = self.timing.get(taker, 0.0) + seconds

    def warn(self, *messages: str) -> None:
        """Give warnings, in order."""
        for message in messages:
            self.pass_on(WarningEvent(message=printable(message)))

    def pass_on(self, event: Event) -> None:
        """Tell the listener; a warning, whoever gave it, is also kept for the report."""
        if isinstance(event, WarningEvent):
            self.notes.append(event.message)
        self._listener(event)
