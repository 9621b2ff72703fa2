"""What several processes divide, as the command does it, and what is refused to several."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stages.killing import Place, furnished
from tests.stages.test_ranks_lost import SHARDED, Ended, run_command, run_ranks, weights

GATED = ("--steps", "6", "--eval-every", "3", "--batch", "4", "--gate", "--precision", "f32")


def gated(place: Place, world: int, *more: str) -> Ended:
    return run_command(place.folder, world, place.command(*GATED, *more))


def report_of(place: Place) -> dict[str, Any]:
    return dict(json.loads(Path(f"{place.out}.report.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = furnished(tmp_path_factory.mktemp("alone"))
    ran = place.run(*GATED, *SHARDED)
    assert ran.returncode == 0, ran.stderr
    for flag in SHARDED:
        assert f"{flag} does nothing in one process" in ran.stderr
    assert report_of(place)["tool"]["ranks"] is None
    return place


@pytest.mark.parametrize(("world", "more"), [(2, ()), (4, ("--o1", "auto:1"))], ids=["two", "four"])
def test_everything_divided_writes_the_same_bytes(
    world: int, more: tuple[str, ...], alone: Place, tmp_path: Path
) -> None:
    """With the gate, for whose three prompts one of four processes has nothing to do but to take part."""
    places = [furnished(tmp_path / name) for name in ("whole", "divided")]
    for place, flags in zip(places, ((), SHARDED), strict=True):
        ended = gated(place, world, *more, *flags)
        assert ended.codes == [0] * world, ended.said
        assert ended.said[1:] == [""] * (world - 1)
    assert places[1].out.read_bytes() == places[0].out.read_bytes()
    whole, divided = map(report_of, places)
    assert divided["gate"] == whole["gate"]
    assert divided["losses"][-1]["ce"] == whole["losses"][-1]["ce"]
    assert (divided["tool"]["ranks"]["shard_optimizer"], divided["tool"]["ranks"]["shard_model"]) == (True, True)
    assert whole["tool"]["ranks"]["shard_model"] is False
    if not more:
        assert report_of(alone)["gate"]["status"] == "ran"
        want = weights(alone.out)
        assert np.linalg.norm(weights(places[1].out) - want) < 1e-5 * np.linalg.norm(want)
    peaks, sent = divided["tool"]["ranks"]["peak_rss_bytes"], divided["tool"]["ranks"]["sent_bytes"]
    assert len(peaks) == len(sent) == world
    assert divided["memory"]["peak_rss_bytes"] == max(peaks)
    # No more than whole: both layers of this model stay in the two buffers that layers are sent into.
    assert sent == whole["tool"]["ranks"]["sent_bytes"]
    assert min(sent) > 4 * divided["trainable_params"] * 2 * (world - 1) // world


def test_a_dry_run_of_several_tells_the_memory_of_one(tmp_path: Path) -> None:
    place = furnished(tmp_path)
    folder = place.folder
    found = {}
    for flags in ((), SHARDED):
        command = [sys.executable, "-c", TO_FILE, str(folder), *place.command("--batch", "4", "--dry-run")[3:], *flags]
        ended = run_command(folder, 2, command)
        assert ended.codes == [0, 0], ended.said
        assert (folder / "out-1").read_text() == ""
        found[flags] = json.loads((folder / "out-0").read_text())["memory"]
    whole, divided = found[()], found[SHARDED]
    assert divided["masters"] + divided["moments"] <= 0.55 * (whole["masters"] + whole["moments"])
    assert divided["gradient"] == whole["gradient"]
    assert divided["frozen"] < whole["frozen"]
    assert divided["buffers"] > whole["buffers"] == 0
    assert whole["transfers"] > 0


TO_FILE = """
import os, sys
from cortiq_fcd.cli import exits
with open(f"{sys.argv[1]}/out-{os.environ['RANK']}", "w") as sys.stdout:
    code = exits.run([*sys.argv[2:], "--json"])
os._exit(code)
"""


@pytest.mark.parametrize("command", ["convert", "eval", "gate", "inspect"])
def test_other_commands_are_refused_to_several(command: str, tmp_path: Path) -> None:
    arguments = ["a", "b"] if command == "convert" else ["a"]
    ended = run_command(tmp_path, 2, [sys.executable, "-m", "cortiq_fcd", command, *arguments])
    assert ended.codes == [2, 2]
    assert ended.said[0].startswith(f"error: {command}: 2 processes were started, and only polish shares its work")
    assert ("torchrun can polish what it writes" in ended.said[0]) == (command == "convert")
    assert ended.said[1] == ""


def test_a_budget_is_for_one(tmp_path: Path) -> None:
    ended = run_ranks(furnished(tmp_path), 2, "--memory-budget", "1G")
    assert ended.codes == [2, 2]
    assert "error: --memory-budget: 2 processes were started, and a budget works in one alone" in ended.said[0]
