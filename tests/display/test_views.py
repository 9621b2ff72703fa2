"""Reports on a terminal: everything is there, nothing is wider than the screen, hostile text can't steer it."""

from __future__ import annotations

import io
import math
import sys
from typing import Any

import pytest
from rich.console import Console

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import line_chart, sparkline, squeeze
from cortiq_fcd.display.page import report_page
from cortiq_fcd.display.report_rows import time_rows
from cortiq_fcd.display.report_view import show_record, show_report
from cortiq_fcd.stages.report import KlInfo, PplInfo
from tests.reports import IDENTITY, REJECTED_GATE, SKIPPED_GATE, sample_report


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
    assert figures.perplexity(123456.0) == "1.235e+05"
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
