"""Progress: what each kind writes, what it never writes, and that it can't take a run down."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from cortiq_fcd.display import make_listener
from cortiq_fcd.display.guard import Guarded
from cortiq_fcd.display.live import LiveDisplay
from cortiq_fcd.display.plain import Plain
from cortiq_fcd.events import (
    DoneEvent,
    EvalEvent,
    Event,
    GateEvent,
    StageEvent,
    StepEvent,
    WarningEvent,
)
from tests.display.terminal import ROWS, Screen, Session, start

SENTENCE = "Polished: perplexity of served positions 41.2 -> 36.9."


def step_event(step: int, steps: int = 40, ce: float = 3.2) -> StepEvent:
    return StepEvent(step=step, steps=steps, ce=ce, kl=0.05 / step, grad_norm=1.2, seconds=0.5, tokens=1024)


def a_run(steps: int = 40) -> Iterator[Event]:
    yield StageEvent(stage="dequantize", detail="a model of thirty layers " * 12)
    yield StageEvent(stage="dequantize", seconds=0.31)
    yield StageEvent(stage="polish", detail=f"{steps} steps of 2 x 512 tokens")
    yield EvalEvent(step=0, ppl=21.0, teacher_ppl=19.16, start_ppl=21.0, best_step=0, best_ppl=21.0)
    yield WarningEvent(message="text beyond 2000000 bytes was cut off:\nsecond line of a warning that is long " * 4)
    for step in range(1, steps + 1):
        yield step_event(step, steps)
        if step % 20 == 0:
            yield EvalEvent(step=step, ppl=20.5, teacher_ppl=19.16, start_ppl=21.0, best_step=step, best_ppl=20.5)
            yield GateEvent(step=step, scores=[0.05, 0.4, 0.0], passed=step > 20)
    yield StageEvent(stage="polish", seconds=75.2)
    yield DoneEvent(outcome="polished", output="out.cmf", report="out.cmf.report.json", sentence=SENTENCE)


def lines_of(kind: str, **options: bool) -> list[str]:
    stream = io.StringIO()
    with make_listener(kind, stream, **options) as listener:  # type: ignore[arg-type]
        for event in a_run():
            listener(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("kind", ["auto", "rich", "plain", "json", "none"])
def test_no_carriage_return_and_no_escape_code_without_a_terminal(kind: str) -> None:
    text = "\n".join(lines_of(kind, verbose=True))
    assert "\r" not in text
    assert "\x1b" not in text


def test_plain_lines() -> None:
    lines = lines_of("plain")
    steps = [line for line in lines if "step " in line and "eval" not in line and "gate" not in line]
    assert 2 <= len(steps) < 40, "one step line a second at most, and the last"
    assert "step 40/40: ce 3.2, kl 0.00125, gradient norm 1.2, 2,048 tokens/s" in steps[-1]
    assert any("eval step 0: val perplexity 21.00 (exact attention 19.16, start 21.00" in line for line in lines)
    assert sum("eval step" in line for line in lines) == 3
    assert any("gate step 20: failed, loop scores 0.05 0.40 0.00" in line for line in lines)
    assert any("gate step 40: passed" in line for line in lines)
    assert any("polish done in 1 min 15 s" in line for line in lines)
    assert lines[-1].endswith(f"{SENTENCE} Written: out.cmf, report: out.cmf.report.json")


def test_the_verdict_of_the_gate_command_has_no_step() -> None:
    stream = io.StringIO()
    with make_listener("plain", stream) as listener:
        listener(GateEvent(step=0, scores=[0.05], passed=True))
    assert "gate: passed, loop scores 0.05" in stream.getvalue()


def test_verbose_has_a_line_for_every_step() -> None:
    assert sum(" step " in line and "ce 3.2" in line for line in lines_of("plain", verbose=True)) == 40


def test_quiet_says_nothing_but_warnings() -> None:
    assert lines_of("json", quiet=True) == lines_of("none")


def test_plain_lines_begin_at_once() -> None:
    stream = io.StringIO()
    with make_listener("plain", stream):
        assert "starting" in stream.getvalue(), "before any event: loading takes seconds"


def test_none_still_warns() -> None:
    assert len(lines_of("none")) == 1
    assert lines_of("none")[0].startswith("warning: text beyond")


def test_json_is_one_event_a_line() -> None:
    adapter: TypeAdapter[Event] = TypeAdapter(Event)
    assert [adapter.validate_json(line) for line in lines_of("json")] == list(a_run())


def test_json_has_null_for_numbers_that_are_none() -> None:
    stream = io.StringIO()
    with make_listener("json", stream) as listener:
        listener(step_event(1, ce=math.nan))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(stream.getvalue(), parse_constant=refuse)["ce"] is None


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_live_block_never_wraps(width: int, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, force_terminal=True, width=width)
    display = LiveDisplay(console)
    for event in a_run():
        if not isinstance(event, DoneEvent):
            display(event)
        lines = console.render_lines(display.render(), pad=False)
        text = ["".join(segment.text for segment in line) for line in lines]
        assert len(text) <= 16
        assert all(len(line) <= width for line in text)
        "\n".join(text).encode(encoding)
    shown = "\n".join(text)
    if width >= 80:
        for part in ("dequantize", "40/40", "2,048 tokens/s", "ce", "kl", "gradient", "best 20.50 @40", "start 21.00"):
            assert part in shown
        assert "exact 19.16" in shown
        assert "gate @40    passed  loop scores 0.05 0.40 0.00" in shown


def test_live_display_survives_numbers_that_are_none() -> None:
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=80))
    display(StageEvent(stage="polish"))
    display(step_event(1, ce=math.nan))
    display(EvalEvent(step=1, ppl=math.inf, teacher_ppl=1.0, start_ppl=1.0, best_step=None, best_ppl=None))
    Console(file=io.StringIO()).print(display.render())


class _Broken:
    def __call__(self, event: Event) -> None:
        raise OSError("the terminal is gone")

    def open(self) -> None:
        pass

    def close(self) -> None:
        raise OSError("still gone")


def test_a_broken_display_is_dropped_and_the_run_goes_on() -> None:
    stream = io.StringIO()
    with Guarded(_Broken(), stream) as listener:
        for event in a_run():
            listener(event)
    assert stream.getvalue() == (
        "note: the progress display stopped (OSError: the terminal is gone); the run goes on\n"
    )


def test_a_closed_stream_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    with Guarded(Plain(stream), stream) as listener:
        stream.close()
        for event in a_run():
            listener(event)


SCRIPT = """
import sys, time
from cortiq_fcd.display import make_listener
from tests.display.test_progress import a_run
with make_listener(sys.argv[1], sys.stderr) as listener:
    for event in a_run():
        listener(event)
        time.sleep(0.02)
"""


def on_a_terminal(kind: str, columns: int = 80, **environment: str) -> Session:
    """A run of events as a child process shows it."""
    session = start(["-c", SCRIPT, kind], columns, **environment)
    assert session.end() == 0
    return session


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_gets_the_live_display(columns: int) -> None:
    session = on_a_terminal("auto", columns)
    assert not session.screen.has_wrapped
    for words in (SENTENCE, "dequantize", "40/40", "gate @20", "gate @40", "written: out.cmf", "memory"):
        assert session.screen.count(words) == 1
    assert session.screen.count("starting") == 0
    assert session.screen.count("Ctrl-C") == 0


class _Recorder(io.StringIO):
    """A terminal that shows every single write."""

    def __init__(self, screen: Screen, look: Callable[[], None]) -> None:
        super().__init__()
        self._screen, self._look = screen, look

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._screen.feed(text.replace("\n", "\r\n").encode())  # as a terminal driver does
        self._look()
        return len(text)


@pytest.mark.parametrize("columns", [80, 200])
def test_nothing_wraps_or_flickers(columns: int) -> None:
    """After every write to the terminal all that was shown is still there, once: no line goes and comes back."""
    screen, known = Screen(columns), set[str]()

    def look() -> None:
        assert not screen.has_wrapped
        for words in known:
            assert screen.count(words) == 1, words

    console = Console(file=_Recorder(screen, look), force_terminal=True, width=columns, height=ROWS, _environ={})
    display = LiveDisplay(console)
    display.live.auto_refresh = False  # drawn below, so that every write is looked at
    display.open()
    for event in a_run():
        if isinstance(event, DoneEvent):
            break
        display(event)
        display.live.refresh()
        known |= {f"{name}  " for name in ("dequantize", "polish") if screen.count(f"{name}  ")}
        known |= {name for name in ("val ppl", "gate @20", "gradient", "memory") if screen.count(name)}
    assert len(known) == 6
    display.show_stopping()
    screen.feed(b"^C")  # what the terminal echoes
    display.live.refresh()
    assert screen.count("^C") == 0
    assert screen.count("stopping") == 1
    display.close()
    assert screen.count("stopping") == 0


def test_a_display_that_showed_nothing_leaves_nothing() -> None:
    screen = Screen(80)
    display = LiveDisplay(Console(file=_Recorder(screen, lambda: None), force_terminal=True, width=80, _environ={}))
    display.open()
    assert screen.count("starting") == 1
    display.close()
    assert "".join(screen.lines) == ""


@pytest.mark.parametrize("kind", ["auto", "plain"])
def test_no_color_is_honoured(kind: str) -> None:
    session = on_a_terminal(kind, NO_COLOR="1")
    assert session.screen.count(SENTENCE) == 1
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-7]|38;[0-9;]*|9[0-7])m", session.written)


@pytest.mark.parametrize("arguments", [("plain", {}), ("auto", {"TERM": "dumb"})], ids=["plain", "dumb terminal"])
def test_plain_lines_on_a_terminal(arguments: tuple[str, dict[str, str]]) -> None:
    kind, environment = arguments
    assert b"\x1b" not in on_a_terminal(kind, **environment).written
