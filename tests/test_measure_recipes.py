"""tools/measure_recipes.py: what it runs, that it runs nothing twice, and the table that it makes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import Tiny, tiny_text, tiny_tokenizer

TOOL = Path(__file__).resolve().parents[1] / "tools" / "measure_recipes.py"

PLAN = """
seeds = [0]
steps = [2]
[common.train]
seq = 40
batch = 1
eval_every = 0
[common.compute]
threads = 1
device = "cpu"
[common.gate]
threshold = 1.0
slack = 1.0
[models.tiny]
file = "{folder}/in.cmf"
texts = ["cats"]
o1 = {{ layers = "all", m = 4, w = 5, sink = 2 }}
[texts.cats]
train = "{folder}/train.txt"
val = "{folder}/val.txt"
[texts.birds]
train = "{folder}/val.txt"
val = "{folder}/train.txt"
[recipes.certified]
lr = 2e-3
[recipes.other]
lr = 2e-3
match = 0.5
"""


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("measure_recipes", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["measure_recipes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    (tmp_path / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    Tiny(layers=2, seed=5).write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer())
    (tmp_path / "plan.toml").write_text(PLAN.format(folder=tmp_path), encoding="utf-8")
    return tmp_path


def test_a_plan_becomes_a_table_and_nothing_runs_twice(
    tool: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    arguments = ["measure_recipes", str(folder / "plan.toml"), str(out), "--only", "other"]
    monkeypatch.setattr("sys.argv", arguments)
    tool.main()
    names = {path.name for path in out.iterdir()}
    own = "tiny-cats-other"
    assert names == {
        f"{own}-2-seed0.report.json", f"{own}-2-seed0.gate.json", f"{own}-2-seed0.eval-birds.json",
        f"{own}-control-2-seed0.report.json", "table.json", "table.md",
    }  # fmt: skip
    report = json.loads((out / f"{own}-2-seed0.report.json").read_text())
    assert (report["recipe"]["match"], report["recipe"]["polish_only"], report["steps_run"]) == (0.5, False, 2)
    control = json.loads((out / f"{own}-control-2-seed0.report.json").read_text())
    assert control["recipe"]["polish_only"] is True
    (row,) = json.loads((out / "table.json").read_text())
    assert row["served"] == report["ppl"]["served"]["final"]
    assert row["control"] == control["ppl"]["served"]["final"]
    other = json.loads((out / f"{own}-2-seed0.eval-birds.json").read_text())
    assert row["other birds"] == other["served"]["ppl"]
    assert "| other | 2 | 1 |" in capsys.readouterr().out

    monkeypatch.setattr(tool, "call", None)
    tool.main()
    assert {path.name for path in out.iterdir()} == names


def test_means_and_spread(tool: Any) -> None:
    row = {"served": 20.0, "served spread": 0.25, "steps": 50}
    assert tool.cell(row, "served", ".2f") == "20.00 ± 0.25"
    assert tool.cell(row, "served", ".0f") == "20"
    assert tool.cell(row, "steps", "d") == "50"
    assert tool.cell(row, "kl", ".2f") == ""
