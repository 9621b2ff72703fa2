"""Plain lines for logs: no carriage return, no escape code, one step line a second at most."""

from __future__ import annotations

import time
from typing import TextIO

from cortiq_fcd.display import figures
from cortiq_fcd.display.state import STARTING, RunState
from cortiq_fcd.events import DoneEvent, EvalEvent, Event, GateEvent, StageEvent, StepEvent, WarningEvent
from cortiq_fcd.stages.capacity import peak_resident_bytes


class Plain:
    """One line a stage, a step (at most one every `every_s` seconds, and the last), an evaluation, a verdict."""

    def __init__(self, stream: TextIO, *, every_s: float = 1.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._state = RunState()
        self._began_s = time.monotonic()
        self._last_step_s = -every_s

    def __call__(self, event: Event) -> None:
        """Write the event's line, if it gets one."""
        self._state.update(event)
        if isinstance(event, StepEvent) and not self._is_due(event):
            return
        self._line(self._text(event))

    def open(self) -> None:
        """Start the clock, and say so: loading takes seconds."""
        self._began_s = time.monotonic()
        self._line(STARTING)

    def close(self) -> None:
        """Nothing to give back."""

    def _is_due(self, event: StepEvent) -> bool:
        now_s = time.monotonic()
        if event.step < event.steps and now_s - self._last_step_s < self._every_s:
            return False
        self._last_step_s = now_s
        return True

    def _line(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = f"{time.monotonic() - self._began_s:8.1f} s  {figures.printable(' '.join(text.split()))}"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def _text(self, event: Event) -> str:
        if isinstance(event, StageEvent):
            return stage_text(event)
        if isinstance(event, StepEvent):
            return self._step_text(event)
        if isinstance(event, EvalEvent):
            return eval_text(event)
        if isinstance(event, GateEvent):
            verdict = "passed" if event.passed else "failed"
            scores = figures.scores(event.scores) + figures.tight_loops(event.tight_loops)
            return f"gate{self._state.gate_place(event, 'step ')}: {verdict}, loop scores {scores}"
        if isinstance(event, WarningEvent):
            return f"warning: {event.message}"
        return done_text(event)

    def _step_text(self, event: StepEvent) -> str:
        text = f"step {event.step}/{event.steps}: ce {figures.nats(event.ce)}, kl {figures.nats(event.kl)}"
        text += f", gradient norm {event.grad_norm:.3g}"
        if (speed := self._state.tokens_per_s) is not None:
            text += f", {speed:,.0f} tokens/s"
        if (left_s := self._state.time_left_s) is not None and event.step < event.steps:
            text += f", {figures.duration(left_s)} left"
        if event.step == event.steps and (peak := peak_resident_bytes()) is not None:
            text += f", peak memory {figures.size(peak)}"
        return text


class Warnings:
    """`--progress none` and `-q`: no progress, but what a user should know is still said."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        """Write warnings and the outcome, nothing else."""
        if isinstance(event, WarningEvent):
            self._stream.write(f"warning: {figures.printable(' '.join(event.message.split()))}\n")
            self._stream.flush()

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""


def stage_text(event: StageEvent) -> str:
    """A stage that began or ended."""
    detail = f": {event.detail}" if event.detail else ""
    return (
        f"{event.stage} done in {figures.duration(event.seconds)}"
        if event.seconds is not None
        else f"{event.stage}{detail}"
    )


def eval_text(event: EvalEvent) -> str:
    """A validation, with what to compare it to."""
    text = f"eval step {event.step}: val perplexity {figures.perplexity(event.ppl)}"
    text += f" (exact attention {figures.perplexity(event.teacher_ppl)}, start {figures.perplexity(event.start_ppl)}"
    if event.best_step is not None:
        text += f", best {figures.perplexity(event.best_ppl)} at step {event.best_step}"
    return text + ")"


def done_text(event: DoneEvent) -> str:
    """The outcome and where it is."""
    return f"{event.sentence} Written: {event.output}, report: {event.report}"
