"""Reports on a terminal: everything is there, nothing is wider than the screen, hostile text can't steer it."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import line_chart, sparkline, squeeze
from cortiq_fcd.display.inspect_view import recorded_facts, show_inspection
from cortiq_fcd.display.page import report_page
from cortiq_fcd.display.report_rows import time_rows
from cortiq_fcd.display.report_view import marked, show_record, show_report
from cortiq_fcd.display.results import result_console
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.stages.inspection import inspect_model
from cortiq_fcd.stages.report import Continuation, KlInfo, PplInfo
from tests.reports import IDENTITY, REJECTED_GATE, SKIPPED_GATE, sample_report
from tests.tiny_model import write_tiny_model


def shown(width: int = 80, **changes: Any) -> str:
    stream = io.StringIO()
    show_report(sample_report(**changes), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        IDENTITY | {"gate": REJECTED_GATE},
        {"gate": SKIPPED_GATE},
        {"ppl": PplInfo(), "kl_served": KlInfo(), "losses": []},
    ],
    ids=["polished", "identity", "gate skipped", "nothing measured"],
)
def test_fits_the_width_and_has_no_escape_codes(width: int, changes: dict[str, Any]) -> None:
    text = shown(width, **changes)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width


def test_polished() -> None:
    text = shown(200)
    assert text.startswith("Polished: perplexity of served positions 41.2 -> 36.9")
    rows = [line.split("  ") for line in text.splitlines()]
    served = next(row for row in rows if "served positions" in row)
    assert [cell.strip() for cell in served if cell.strip()] == [
        "served positions",
        "30.10",
        "41.20",
        "36.90",
        "-10.4 %",
    ]
    assert "step 0 (before)" in text
    assert "passed *" in text
    assert "; * = chosen" in text
    assert "not decoded: couldn't win" in text
    assert "layers 0-3, 5" in text
    assert "! text beyond 2000000 bytes was cut off" in text
    assert "█" in text
    assert "[ and then she went away]" in text
    assert "Where time went" in text


def test_what_to_do_next_and_what_noise_is() -> None:
    for text in (" ".join(shown(200).split()), " ".join(report_page(sample_report()).split())):
        assert "cortiq-fcd export" in text
        assert "ingle steps are noisy, as each sees other text" in text
    identity = " ".join(shown(200, **IDENTITY | {"gate": REJECTED_GATE}).split())
    assert "to try next: more --steps, a larger --lr, or a wider --o1-window (docs/choosing.md)." in identity


def test_prompts_begin_with_a_whole_word() -> None:
    assert figures.prompt_end("ding to the\nhouse ") == "... to the house"
    assert figures.prompt_end(" according to") == "... according to"
    assert figures.prompt_end("一个没有空格的句子") == "... 一个没有空格的句子"
    assert figures.prompt_end("word ") == "... word"
    assert figures.prompt_end("") == "... "
    gate = sample_report().gate
    assert gate.texts is not None
    prompts = [text.model_copy(update={"prompt": "ding to the house"}) for text in gate.texts.prompts]
    cut = gate.model_copy(update={"texts": gate.texts.model_copy(update={"prompts": prompts})})
    for text in (shown(200, gate=cut), report_page(sample_report(gate=cut))):
        assert "... to the house" in text
        assert "ding" not in text.replace("Reading", "").replace("padding", "")
    assert marked(Continuation(text=" and then", repeats=[(0, 4)])).plain == "[ and] then"
    assert marked(Continuation(text=" and then", repeats=[])).plain == "and then"


def test_what_took_next_to_nothing_is_told_together() -> None:
    timing = {
        "prepare": 0.1,
        "replica": 0.2,
        "polish": 99.0,
        "polish.a": 98.0,
        "polish.b": 0.4,
        "gate": 0.7,
        "gate.x": 0.7,
    }
    rows = [(row.name, row.depth) for row in time_rows(timing)]
    assert rows == [("polish", 0), ("a", 1), ("other", 1), ("other", 0)]
    assert time_rows(timing)[-1].seconds == pytest.approx(1.0)
    assert time_rows({"a": 0.0}) != []


@pytest.mark.parametrize("command", ["report", "inspect"])
def test_a_table_in_a_pipe_has_no_trailing_blanks(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = result_console()
    if command == "report":
        show_report(sample_report(), console)
    else:
        file = write_tiny_model(tmp_path / "in.cmf")
        with open_model(file) as model:
            show_inspection(inspect_model(model, file), console)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_record_is_told_in_short() -> None:
    record = {"outcome": "polished", "best_step": 40, "steps": 60, "ppl_start": 41.04, "converted_layers": [0, 1, 2, 5],
              "gate": {"baseline": [0.1] * 50}, "corpus": {"train": "a" * 64}}  # fmt: skip
    rows = dict(recorded_facts({"layers": "all"}, record))
    assert rows["polish"] == "polished"
    assert rows["  layers"] == "0-2, 5"
    assert rows["  before, quick windows"] == "41.04"
    assert "baseline" not in str(rows)
    for hostile in (
        "x" * 10**6,
        ["y"] * 10**5,
        3,
        {"steps": {"a": [[]] * 999}, "converted_layers": [2**70, -1] * 9999},
    ):
        assert len(str(recorded_facts(None, hostile))) < 2000


def test_gate_skipped_says_why() -> None:
    assert f"skipped: {SKIPPED_GATE.reason}" in shown(200, gate=SKIPPED_GATE)


def test_polish_only_and_a_separate_teacher() -> None:
    recipe = sample_report().recipe.model_copy(update={"polish_only": True, "teacher": "big.cmf"})
    text = shown(200, recipe=recipe)
    assert "landmarks" not in text
    assert "attention stayed exact (--polish-only)" in text
    assert "teacher  big.cmf" in text


def test_a_record_alone() -> None:
    stream = io.StringIO()
    record = {
        "steps": 20,
        "lr": 3e-4,
        "converted_layers": [0, 1, 2],
        "gate": {"status": "ran", "baseline": [0.1, 0.25]},
    }
    show_record(record, Console(file=stream, width=80))
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        "",
        "provenance.fcd",
        "steps             20",
        "lr                0.0003",
        "converted_layers  0-2",
        "gate              status ran, baseline 0.1 0.25",
    ]


def test_text_from_files_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    show_record(
        {"evil\x1b[2J": "\x1b]0;title\x07\r"}, Console(file=stream, width=80, force_terminal=True, no_color=True)
    )
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert "[2J" in shown(200, warnings=["\x1b[2J"])


def test_sparkline_and_chart() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([float("nan"), 1.0, float("inf"), 2.0], 8) == "▁█"
    assert squeeze([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert squeeze([1.0], 0) == []


def test_phases_stand_below_their_stage_and_are_not_counted_twice() -> None:
    timing = {"gate": 10.0, "polish": 30.0, "polish.backward": 20.0, "polish.forward": 8.0, "polish.update": 2.0}
    rows = [(row.name, row.depth, row.share) for row in time_rows(timing)]
    phases = [("backward", 1, 0.5), ("forward", 1, 0.2), ("update", 1, 0.05)]
    assert rows == [("gate", 0, 0.25), ("polish", 0, 0.75), *phases]
    assert "of 60, 40.0 s" in report_page(sample_report(timing=timing))
    assert "  backward" in shown(80, timing=timing)


@pytest.mark.parametrize("columns", [30, 76, 200])
def test_line_chart(columns: int) -> None:
    rows = line_chart([(0.0, 25.5), (20.0, None), (40.0, 25.39), (60.0, 25.44)], columns)
    assert max(map(len, rows)) <= columns
    assert rows[1].endswith(" 25.5")
    assert rows[-2].startswith("╰")
    assert rows[-3].endswith(" 25.39")
    assert rows[-1].split() == ["0", "60"]
    assert len(rows) == 11
    assert line_chart([(0.0, 1.0), (1.0, math.nan)], columns) == []
    assert line_chart([(0.0, 1.0), (1.0, 1.0)], columns)
    assert line_chart([(0.0, 1.0), (1.0, 2.0)], 20) == []


def test_a_chart_library_that_fails_takes_nothing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uniplot", None)
    text = shown(80)
    assert "╭" not in text
    assert "Where time went" in text


def test_figures() -> None:
    assert figures.perplexity(None) == "-"
    assert figures.perplexity(20.163) == "20.16"
    assert figures.perplexity(123456.4) == "123,456"
    assert figures.perplexity(1234.56) == "1,234.6"
    assert figures.perplexity(1.5e12) == "1.5e+12"
    assert figures.change(40.0, 36.0) == "-10.0 %"
    assert figures.change(None, 36.0) == "-"
    assert figures.change(36.0, 36.0) == "same"
    assert figures.count(134_515_008) == "134.5 M"
    assert figures.size(999) == "999 B"
    assert figures.size(2_400_000_000) == "2.4 GB"
    assert figures.duration(59.96) == "1 min 00 s"
    assert figures.duration(3723) == "1 h 02 min"
    assert figures.layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert figures.layers([]) == ""
    assert figures.printable("ä\x1b\n") == "ä\\x1b\\n"
