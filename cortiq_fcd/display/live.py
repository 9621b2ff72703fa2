"""The live display of a terminal: stages, a progress bar, the numbers of training, the gate's verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import sparkline
from cortiq_fcd.display.state import STARTING, RunState, StageState
from cortiq_fcd.events import DoneEvent, Event, StepEvent
from cortiq_fcd.stages.capacity import peak_resident_bytes, resident_bytes

REFRESH_PER_S = 4
MOST_COLUMNS = 112
NAME_COLUMNS = 11
VERDICTS_SHOWN = 4
WARNINGS_SHOWN = 3
# A terminal echoes ^C where the cursor is, behind the last line. At the right edge that would wrap, and every line that
# follows would be drawn one too low; so that line is kept short of the edge.
ECHO_COLUMNS = 6

HOW_TO_STOP = "Ctrl-C ends this step, saves and stops"
STOPPING = "stopping: this step is ended and saved first; Ctrl-C again stops at once"


class LiveDisplay:
    """Redraws one block in place; what is left at the end is the summary of the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunState()
        self._unicode = console.encoding.lower().startswith("utf")
        self._spinner = Spinner("dots" if self._unicode else "line", style="cyan")
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=REFRESH_PER_S)
        self._is_open = False
        self._is_stopping = False

    def __call__(self, event: Event) -> None:
        """Take the event in; the refresh thread draws it."""
        self._state.update(event)
        if isinstance(event, DoneEvent):
            self.close()
            for message in self._state.warnings:  # whole: the block above had to cut them
                self._console.print(Text(figures.printable(f"! {message}"), style="yellow"))
            self._console.print(Text(figures.printable(event.sentence), style="bold"))
            for name, path in (("written:", event.output), ("report: ", event.report)):
                self._console.print(Text(f"{name} {figures.printable(path)}"), soft_wrap=True)

    def open(self) -> None:
        """Begin drawing."""
        self._is_open = True
        self.live.start(refresh=True)  # at once, not at the first tick

    def close(self) -> None:
        """Draw once more and stop."""
        self._is_open = False
        self.live.stop()

    def show_stopping(self) -> None:
        """Tell that the run will stop. Only sets a flag: a signal handler calls it."""
        self._is_stopping = True

    def render(self) -> RenderableType:
        """The block as it is now. Every line is cut at the terminal's width, so that nothing wraps."""
        try:
            return Constrain(Group(*self._rows()), MOST_COLUMNS)
        except Exception as error:  # in the refresh thread, where Guarded can't catch it
            return Text(figures.printable(f"display: {error}"), no_wrap=True, overflow="crop")

    def _rows(self) -> Iterable[RenderableType]:
        stages = list(self._state.stages.values())
        if not stages and self._is_open:
            yield self._starting()
        for stage in stages:
            yield self._stage(stage)
            if stage.name == "polish" and self._state.step is not None:
                yield self._bar(self._state.step)
                yield from self._numbers(self._state.step)
        yield from self._verdicts()
        for message in [] if self._state.done else self._state.warnings[-WARNINGS_SHOWN:]:
            yield self._line(f"! {message}", "yellow")
        if stages:
            yield self._memory()
        if self._is_open and (self._is_stopping or self._state.is_training):
            yield self._hint()

    def _stage(self, stage: StageState) -> RenderableType:
        mark: RenderableType = self._spinner
        if stage.seconds is not None:
            mark = Text("✓" if self._unicode else "+", style="green")
        elif not self._is_open:
            mark = Text("·" if self._unicode else "-", style="yellow")  # left unfinished
        took = self._line(figures.duration(stage.so_far_s), "dim")
        row = Table.grid(padding=(0, 1), expand=True)
        for width in (1, NAME_COLUMNS, NAME_COLUMNS):
            row.add_column(width=width)
        row.add_column(ratio=1)
        row.add_row(mark, self._line(stage.name), took, self._line(stage.detail, "dim"))
        return row

    def _starting(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        row.add_row(self._spinner, self._last(STARTING, "dim"))
        return row

    def _bar(self, event: StepEvent) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=1)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        speed, left_s = self._state.tokens_per_s, self._state.time_left_s
        text = f"step {event.step}/{event.steps}"
        text += f"  {speed:,.0f} tokens/s" if speed is not None else ""
        text += f"  {figures.duration(left_s)} left" if left_s is not None and event.step < event.steps else ""
        bar = ProgressBar(total=event.steps, completed=event.step, complete_style="cyan", finished_style="green")
        row.add_row("", bar, self._line(text))
        return row

    def _numbers(self, step: StepEvent) -> Iterable[RenderableType]:
        state, evaluation = self._state, self._state.evaluation
        room = max(0, min(60, self._console.width - 36)) if self._unicode else 0
        for name, value, curve in (
            ("ce", figures.nats(step.ce), state.ce),
            ("kl", figures.nats(step.kl), state.kl),
            ("gradient", f"{step.grad_norm:.3g}", state.grad_norm),
        ):
            yield self._line(f"  {name:<{NAME_COLUMNS}} {value:<{NAME_COLUMNS}} ").append(
                sparkline(list(curve), room), style="cyan"
            )
        if evaluation is not None:
            best = f"{figures.perplexity(evaluation.best_ppl)} @{evaluation.best_step}"
            text = f"now {figures.perplexity(evaluation.ppl)}"
            text += f"  best {best}" if evaluation.best_step is not None else "  best -"
            text += f"  start {figures.perplexity(evaluation.start_ppl)}"
            text += f"  exact {figures.perplexity(evaluation.teacher_ppl)}"
            yield self._line(f"  {'val ppl':<{NAME_COLUMNS}} {text}")

    def _verdicts(self) -> Iterable[RenderableType]:
        for verdict in self._state.gates[-VERDICTS_SHOWN:]:
            word, style = ("passed", "green") if verdict.passed else ("failed", "red")
            name = f"gate{self._state.gate_place(verdict, '@')}"
            line = self._line(f"  {name:<{NAME_COLUMNS}} ").append(word, style=style)
            scores = figures.scores(verdict.scores) + figures.tight_loops(verdict.tight_loops)
            yield line.append(f"  loop scores {scores}", style="dim")

    def _memory(self) -> Text:
        now, peak = resident_bytes(), peak_resident_bytes()
        known = [f"{figures.size(now)} now"] * bool(now) + [f"{figures.size(peak or 0)} peak"] * (peak is not None)
        return self._last(f"  {'memory':<{NAME_COLUMNS}} {', '.join(known) or '-'}", "dim")

    def _hint(self) -> Text:
        text, style = (STOPPING, "yellow") if self._is_stopping else (HOW_TO_STOP, "dim")
        return self._last(f"  {text}", style)

    def _last(self, text: str, style: str) -> Text:
        line = self._line(text, style)
        line.truncate(max(1, min(MOST_COLUMNS, self._console.width) - ECHO_COLUMNS), overflow=line.overflow)
        return line

    def _line(self, text: str, style: str = "") -> Text:
        """One line that the terminal can encode, cut at its edge."""
        encoding = self._console.encoding
        known = figures.printable(" ".join(text.splitlines())).encode(encoding, "replace").decode(encoding)
        return Text(known, style=style, no_wrap=True, overflow="ellipsis" if self._unicode else "crop")
