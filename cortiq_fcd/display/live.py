"""The live display of a terminal: stages, a progress bar, the numbers of training, the gate's verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import sparkline
from cortiq_fcd.display.state import RunState, StageState
from cortiq_fcd.events import DoneEvent, Event, StepEvent
from cortiq_fcd.stages.capacity import peak_resident_bytes

REFRESH_PER_S = 4
VERDICTS_SHOWN = 4
WARNINGS_SHOWN = 3


class LiveDisplay:
    """Redraws one block in place; what is left at the end is the summary of the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunState()
        self._unicode = _is_unicode(console)
        self._spinner = Spinner("dots" if self._unicode else "line")
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=REFRESH_PER_S)

    def __call__(self, event: Event) -> None:
        """Take the event in; the refresh thread draws it."""
        self._state.update(event)
        if isinstance(event, DoneEvent):
            self.close()
            for message in self._state.warnings:  # whole: the block above had to cut them
                self._console.print(Text(figures.printable(f"! {message}"), style="yellow"))
            self._console.print(Text(figures.printable(event.sentence), style="bold"))
            self._console.print(Text(f"written: {figures.printable(event.output)}"))
            self._console.print(Text(f"report:  {figures.printable(event.report)}"))

    def open(self) -> None:
        """Begin drawing."""
        self._live.start()

    def close(self) -> None:
        """Draw once more and stop."""
        self._live.stop()

    def render(self) -> RenderableType:
        """The block as it is now. Every line is cut at the terminal's width, so that nothing wraps."""
        try:
            return Group(*self._rows())
        except Exception as error:  # in the refresh thread, where Guarded can't catch it
            return Text(figures.printable(f"display: {error}"))

    def _rows(self) -> Iterable[RenderableType]:
        for stage in list(self._state.stages.values()):
            yield self._stage(stage)
            if stage.name == "polish" and self._state.step is not None:
                yield self._bar(self._state.step)
                yield from self._numbers(self._state.step)
        yield from self._verdicts()
        if (peak := peak_resident_bytes()) is not None and self._state.stages:
            yield self._line(f"  memory      peak {figures.size(peak)}", "dim")
        shown = [] if self._state.done else self._state.warnings[-WARNINGS_SHOWN:]
        for message in shown:
            yield self._line(f"! {message}", "yellow")

    def _stage(self, stage: StageState) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=1)
        row.add_column(width=11)
        row.add_column(width=12)
        row.add_column(ratio=1)
        mark: RenderableType = self._spinner
        if stage.seconds is not None:
            mark = Text("✓" if self._unicode else "+", style="green")
        took = "" if stage.seconds is None else figures.duration(stage.seconds)
        row.add_row(mark, self._line(stage.name), self._line(took, "dim"), self._line(stage.detail, "dim"))
        return row

    def _bar(self, event: StepEvent) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=1)
        row.add_column(ratio=1)
        row.add_column()
        speed, left_s = self._state.tokens_per_s, self._state.time_left_s
        text = f"{event.step}/{event.steps}"
        text += f"  {speed:.0f} tokens/s" if speed is not None else ""
        text += f"  {figures.duration(left_s)} left" if left_s is not None and event.step < event.steps else ""
        row.add_row("", ProgressBar(total=event.steps, completed=event.step), self._line(text))
        return row

    def _numbers(self, step: StepEvent) -> Iterable[RenderableType]:
        state, evaluation = self._state, self._state.evaluation
        room = max(0, min(40, self._console.width - 32)) if self._unicode else 0
        for name, value, curve in (
            ("ce", figures.nats(step.ce), state.ce),
            ("kl", figures.nats(step.kl), state.kl),
            ("gradient", f"{step.grad_norm:.3g}", state.grad_norm),
        ):
            yield self._line(f"  {name:<11} {value:<12} {sparkline(list(curve), room)}")
        if evaluation is not None:
            text = f"  val ppl     {figures.perplexity(evaluation.ppl):<8}"
            if evaluation.best_step is not None:
                text += f" best {figures.perplexity(evaluation.best_ppl)} @{evaluation.best_step}"
            text += f"  start {figures.perplexity(evaluation.start_ppl)}"
            yield self._line(f"{text}  exact attention {figures.perplexity(evaluation.teacher_ppl)}")

    def _verdicts(self) -> Iterable[RenderableType]:
        for verdict in self._state.gates[-VERDICTS_SHOWN:]:
            style = "green" if verdict.passed else "red"
            word = "passed" if verdict.passed else "failed"
            scores = figures.scores(verdict.scores) + figures.tight_loops(verdict.tight_loops)
            yield self._line(f"  gate @{verdict.step:<5} {word}: loop scores {scores}", style)

    def _line(self, text: str, style: str = "") -> Text:
        """One line that the terminal can encode, cut at its edge."""
        encoding = self._console.encoding
        known = figures.printable(" ".join(text.splitlines())).encode(encoding, "replace").decode(encoding)
        return Text(known, style=style, no_wrap=True, overflow="ellipsis" if self._unicode else "crop")


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
