"""What is known about a running polish, gathered from its events. Every display draws from this."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from cortiq_fcd.events import DoneEvent, EvalEvent, Event, GateEvent, StageEvent, StepEvent, WarningEvent

CURVE_POINTS = 4096
STARTING = "starting: loading libraries, reading the model and the text"


@dataclass
class StageState:
    """One stage, running (seconds is None) or over. A stage may run in several parts: `spent_s` is all that ended."""

    name: str
    detail: str = ""
    seconds: float | None = None
    spent_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def so_far_s(self) -> float:
        """Seconds of all its parts, a running one included."""
        return self.spent_s if self.seconds is not None else self.spent_s + time.monotonic() - self.began_s


@dataclass
class RunState:
    """The sum of all events so far. `update` is the only way in."""

    stages: dict[str, StageState] = field(default_factory=dict)
    step: StepEvent | None = None
    evaluation: EvalEvent | None = None
    gates: list[GateEvent] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    done: DoneEvent | None = None
    ce: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    kl: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    grad_norm: deque[float] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    _recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    _first_step_at_s: float | None = None
    _last_step_at_s: float = 0.0

    def gate_place(self, event: GateEvent, mark: str) -> str:
        """Where in a polish a verdict was given, such as " step 5"; "" for the one of `gate`, which knows no steps."""
        return f" {mark}{event.step}" if "polish" in self.stages else ""

    def update(self, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, StageEvent):
            self._stage(event)
        elif isinstance(event, StepEvent):
            self._step(event)
        elif isinstance(event, EvalEvent):
            self.evaluation = event
        elif isinstance(event, GateEvent):
            self.gates.append(event)
        elif isinstance(event, WarningEvent):
            self.warnings.append(event.message)
        else:
            self.done = event

    def _stage(self, event: StageEvent) -> None:
        stage = self.stages.setdefault(event.stage, StageState(event.stage))
        stage.detail = event.detail or stage.detail
        if event.seconds is None:
            stage.began_s = time.monotonic()
        stage.spent_s += event.seconds or 0.0
        stage.seconds = None if event.seconds is None else stage.spent_s

    def _step(self, event: StepEvent) -> None:
        now_s = time.monotonic()
        if self._first_step_at_s is None:
            self._first_step_at_s = now_s - event.seconds
        self._last_step_at_s = now_s
        self.step = event
        self._recent.append((event.tokens, event.seconds))
        self.ce.append(event.ce)
        self.kl.append(event.kl)
        self.grad_norm.append(event.grad_norm)

    @property
    def is_training(self) -> bool:
        """Whether the training loop is at work."""
        return "polish" in self.stages and self.stages["polish"].seconds is None

    @property
    def tokens_per_s(self) -> float | None:
        """Training speed over the last steps, evaluations left out."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else None

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the last step at the pace so far, evaluations counted in."""
        if self.step is None or self._first_step_at_s is None:
            return None
        pace_s = (self._last_step_at_s - self._first_step_at_s) / self.step.step
        return pace_s * (self.step.steps - self.step.step)
