"""Stages and warnings on their way to the listener, remembered for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

from cortiq_fcd.events import Event, Listener, StageEvent, WarningEvent
from cortiq_fcd.io.paths import printable
from cortiq_fcd.stages.logs import Log, numbers_of

StageName = Literal[
    "prepare", "choose", "estimate", "dequantize", "replica", "gate", "polish", "evaluate", "provenance"
]


class Progress:
    """Tells the listener about stages and warnings, and remembers both for the report."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.timing: dict[str, float] = {}
        self.notes: list[str] = []
        self._logs: list[Log] = []

    @contextmanager
    def stage(self, name: StageName, detail: str) -> Iterator[None]:
        """A stage, timed; entering the same one again adds up."""
        self.pass_on(StageEvent(stage=name, detail=detail))
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.timing[name] = self.timing.get(name, 0.0) + seconds
        self.pass_on(StageEvent(stage=name, detail=detail, seconds=seconds))

    def move(self, giver: StageName, taker: StageName, seconds: float) -> None:
        """Count time that was spent inside one stage for another."""
        self.timing[giver] -= seconds
        self.timing[taker] = self.timing.get(taker, 0.0) + seconds

    def phases(self, stage: StageName, seconds: Mapping[str, float]) -> None:
        """Where the time of a stage went, as `stage.phase`."""
        self.timing.update({f"{stage}.{phase}": spent for phase, spent in seconds.items()})

    def warn(self, *messages: str) -> None:
        """Give warnings, in order."""
        for message in messages:
            self.pass_on(WarningEvent(message=printable(message)))

    def pass_on(self, event: Event) -> None:
        """Tell the listener; a warning, whoever gave it, is also kept for the report."""
        if isinstance(event, WarningEvent):
            self.notes.append(event.message)
        self._listener(event)
        self._log(event)

    @contextmanager
    def logged(self, logs: list[Log]) -> Iterator[None]:
        """Hand the numbers of every event to these logs, too, inside the block."""
        self._logs = logs
        try:
            yield
        finally:
            for log in logs:
                self._attempt(log, log.close)
            self._logs = []

    def _log(self, event: Event) -> None:
        found = numbers_of(event)
        if found is not None:
            for log in list(self._logs):
                self._attempt(log, partial(log.write, *found))

    def _attempt(self, log: Log, action: Callable[[], None]) -> None:
        """A log is a convenience: at its first failure it is dropped, with a warning."""
        try:
            action()
        except Exception as error:
            self._logs = [other for other in self._logs if other is not log]
            self.warn(f"{log.name}: the log ends here, the run goes on ({error})")
