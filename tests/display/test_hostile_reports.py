"""Reports and records that somebody else wrote: any value anywhere ends in a report or an error, in no traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.io.reader import open_model
from tests.command_line import Run
from tests.reports import IDENTITY, REJECTED_GATE, SKIPPED_GATE, sample_report
from tests.tiny_model import write_tiny_model

STEERING = "\x1b]0;title\x07\x1b[2J\r<script>alert(1)</script>\u202e"
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**400, 1e308, -1e308, 5e-324, "", "x" * 100_000, STEERING, "nan", "\0"),
    *([], {}, [[]] * 50, {"a": {"b": [1] * 50}}, [1e308] * 3, [STEERING], [-5, 10**9]),
]
KINDS: list[dict[str, Any]] = [{}, IDENTITY | {"gate": REJECTED_GATE}, {"gate": SKIPPED_GATE}]
MUTATIONS = 25


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in JSON data; of lists the first two entries."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from places(value[index], (*at, index))


def mutated(data: Any, chance: random.Random) -> Any:
    at, new = chance.choice(list(places(data))), chance.choice(VALUES)
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return copy


@pytest.mark.parametrize("seed", range(3))
def test_a_report_that_somebody_else_wrote(run: Run, tmp_path: Path, seed: int) -> None:
    file, page = write_tiny_model(tmp_path / "in.cmf"), tmp_path / "page.html"
    with open_model(file) as model:
        dir_hash = model.dir_hash
    chance, shown = random.Random(seed), 0
    for _ in range(MUTATIONS):
        whole = json.loads(sample_report(**chance.choice(KINDS)).to_json())
        whole["output"]["dir_hash"] = dir_hash
        (tmp_path / "in.cmf.report.json").write_text(json.dumps(mutated(whole, chance)))
        for ran in (run("report", file), run("report", file, "--html", page), run("report", file, "--json")):
            assert ran.code in (0, 2), ran.err
            assert not set("\x1b\r\u202e") & set(ran.out + ran.err)
            shown += ran.code == 0
        if page.exists():
            assert "<script" not in page.read_text(encoding="utf-8")
    assert shown, "all of them are refused"


@pytest.mark.parametrize("record", VALUES + [{"steps": value, "converted_layers": value} for value in VALUES])
def test_a_record_that_somebody_else_wrote(run: Run, tmp_path: Path, record: Any) -> None:
    """In a header, where numbers that JSON has no word for are refused already."""
    file = write_tiny_model(tmp_path / "in.cmf", provenance={"fcd": record, "o1_attn": record})
    for ran in (run("inspect", file), run("report", file)):
        assert ran.code in (0, 2, 3), ran.err
        assert not set("\x1b\r\u202e") & set(ran.out + ran.err)
        assert len(ran.out) < 100_000
