"""A memory budget changes where things are, and not one byte of what is written."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.events import Event, StageEvent, StepEvent, ignore
from cortiq_fcd.io.layout import DType
from cortiq_fcd.model.adamw import adamw_step
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.stored_moments import BUFFER_BYTES, StoredMoments, zeros
from cortiq_fcd.stages import best, estimate, pipeline, prepare
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.estimate import Costs, Memory
from cortiq_fcd.stages.interrupt import Interrupted, Interruption
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.savings import Savings, describe, ladder
from cortiq_fcd.stages.sharding import Sharding
from cortiq_fcd.stages.works import Sizes
from tests.fixtures import LINEAR, Tiny, tiny_text, tiny_tokenizer
from tests.stages.killing import furnished as furnished_for_a_process
from tests.stages.test_pipeline import settings

CPU = torch.device("cpu")
ROOMY = 10**9
HYBRID = {"layer_types": ["LinearAttention", "FullAttention", "LinearAttention", "FullAttention"], **LINEAR}
MODELS = {
    "plain": Tiny(layers=4),
    "hybrid": Tiny(layers=4, arch=HYBRID),
    "looped": Tiny(layers=3, arch={"num_loops": 2}),
    "gated": Tiny(layers=3, gate="channel", biases="qkv", tied=False),
}


def furnished(folder: Path, model: Tiny, dtype: DType = DType.F32) -> Path:
    (folder / "train.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    (folder / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    model.write(folder / "in.cmf", dtype=dtype, tokenizer=tiny_tokenizer())
    return folder


def polished(folder: Path, listener: Any = ignore, asked: Interruption | None = None, **changes: Any) -> bytes:
    config = settings(folder, **{"train_steps": 4, "gate_enabled": False, "output_force": True, **changes})
    pipeline.run(folder / "in.cmf", folder / "out.cmf", config, listener, asked)
    return (folder / "out.cmf").read_bytes()


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Which rung of the ladder a run with a budget takes, and the room that its evaluations have."""
    chosen: dict[str, Any] = {"at": 0, "room": 0}
    settle = estimate.settle

    def settled(sizes: Sizes, device: torch.device, budget: int | None) -> tuple[Memory, Savings]:
        needed, savings = settle(sizes, device, budget)
        if budget is None:
            return needed, savings
        rungs = list(ladder(sizes.plan, sizes.teacher_plan, sizes.conversion))
        return replace(needed, room=chosen["room"]), rungs[chosen["at"]]

    monkeypatch.setattr(prepare, "settle", settled)
    return chosen


CASES = [
    ("plain", "all", False, True),
    ("plain", "deep1", True, False),
    ("hybrid", "all", False, False),
    ("looped", "deep1", False, False),
    ("looped", "all", True, False),
    ("gated", "deep1", False, False),
]


@pytest.mark.parametrize(("name", "layers", "teacher", "gate"), CASES)
def test_the_same_bytes_with_any_savings(
    name: str, layers: str, teacher: bool, gate: bool, rung: dict[str, Any], tmp_path: Path
) -> None:
    model = MODELS[name]
    folder = furnished(tmp_path, model)
    changes: dict[str, Any] = {"o1_layers": layers, "gate_enabled": gate}
    if teacher:
        replace(model, seed=9).write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
        changes["train_teacher"] = folder / "teacher.cmf"
    without = polished(folder, **changes)
    for at, room in ((3, 0), (-1, 0), (-1, 5000)):
        rung.update(at=at, room=room)
        assert polished(folder, compute_memory_budget=ROOMY, **changes) == without, (at, room)
    assert not (folder / "out.cmf.partial").exists()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.Q8_ROW, DType.Q4_BLOCK])
def test_every_kind_of_file(dtype: DType, rung: dict[str, Any], tmp_path: Path) -> None:
    folder = furnished(tmp_path, Tiny(C=32, D=8, F=64), dtype)
    rung.update(at=-1)
    assert polished(folder, compute_memory_budget=ROOMY) == polished(folder)


@pytest.mark.parametrize(("first", "then"), [(None, ROOMY), (ROOMY, None), (ROOMY, ROOMY)])
def test_a_run_goes_on_under_another_budget(
    first: int | None, then: int | None, rung: dict[str, Any], tmp_path: Path
) -> None:
    folder = furnished(tmp_path, MODELS["plain"])
    rung.update(at=-1)
    undisturbed = polished(folder)
    for step in (1, 3):
        asked = Interruption()

        def listener(event: Event, asked: Interruption = asked, step: int = step) -> None:
            if isinstance(event, StepEvent) and event.step == step:
                asked.requested = signal.SIGINT

        with pytest.raises(Interrupted):
            polished(folder, listener, asked, compute_memory_budget=first)
        names = {path.name.split("-")[0] for path in (folder / "out.cmf.partial").iterdir()}
        assert names == {"checkpoint", "lock"}, "a best state of its own is of no use to the next run"
    assert polished(folder, compute_memory_budget=then) == undisturbed


def test_a_full_disk_under_a_budget_is_told(
    rung: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = furnished(tmp_path, MODELS["plain"])

    def full(*_: Any) -> str:
        raise ResourceError("no space left")

    monkeypatch.setattr(best, "write_tensors", full)
    with pytest.raises(ResourceError, match="no space left"):
        polished(folder, compute_memory_budget=ROOMY)
    assert not (folder / "out.cmf").exists()


def test_a_best_state_that_was_changed_on_disk_is_not_used(tmp_path: Path) -> None:
    kept = best.BestOnDisk(tmp_path)
    kept.keep(torch.arange(5.0), 2)
    kept.keep(torch.arange(6.0), 4)
    assert [path.name for path in tmp_path.iterdir()] == ["best-000004.safetensors"]
    vector = kept.vector
    assert vector is not None
    assert best.read_vector(vector).tolist() == list(range(6))
    path = tmp_path / "best-000004.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ResourceError, match="can't be read back"):
        _ = kept.vector


def test_moments_that_can_no_longer_be_read_end_the_run(tmp_path: Path) -> None:
    moments = StoredMoments(tmp_path / "moments.safetensors", zeros(5), zeros(5))
    (tmp_path / "moments.safetensors").write_bytes(b"")
    with pytest.raises(ResourceError, match="became shorter") as caught:
        adamw_step(torch.zeros(5), torch.ones(5), moments, 0.1, 1.0)
    assert "goes on from the last checkpoint" in caught.value.hint


# What is chosen


def sizes(layers: tuple[int, ...], model: Tiny, *, teacher: ModelPlan | None = None) -> Sizes:
    conversion = Conversion(layers, "all", m=4, w=5, sink=2, seal=20)
    return Sizes(model.plan(), teacher, conversion, TrainConfig(batch=2, seq=40, steps=50), 3, 400, 60)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (3,), (1, 3)])
def test_every_rung_needs_less_time_to_memory(layers: tuple[int, ...], separate: bool) -> None:
    """Down to everything but the embedding, two buffers, and one layer's activations."""
    wide = Tiny(layers=12, C=64, F=256, H=8)
    own = sizes(layers, wide, teacher=wide.plan() if separate else None)
    costs = estimate.measure(own, CPU)
    rungs = list(ladder(own.plan, own.teacher_plan, own.conversion))
    needed = [estimate.add_up(own, costs, savings) for savings in rungs]
    assert needed[-1].frozen + needed[-1].teacher < 0.3 * (needed[0].frozen + needed[0].teacher)
    assert needed[-1].activations < needed[0].activations or layers == (3,)
    assert needed[-1].moments < needed[0].moments or needed[0].moments <= BUFFER_BYTES
    assert needed[-1].buffers > 0 == needed[0].buffers
    used = {i for i, _ in rungs[-1].streamed}
    assert used == set(range(12))


def test_the_first_rung_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sizes((0, 1, 2), Tiny())
    costs = replace(estimate.measure(own, CPU), peak=0, in_use=0, evaluation=0)
    monkeypatch.setattr(estimate, "measure", lambda *_: costs)
    monkeypatch.setattr(estimate, "WORKSPACE_BYTES", 0)
    all_needed = [
        estimate.add_up(own, costs, savings) for savings in ladder(own.plan, own.teacher_plan, own.conversion)
    ]
    roomy, savings = estimate.settle(own, CPU, 10**9)
    assert (savings.streamed, savings.recomputed, savings.on_disk) == (frozenset(), frozenset(), True)
    assert (roomy.best, roomy.checkpoint_copy) == (0, 0)
    assert 0 < roomy.room < 10**9
    least = min(needed.peak for needed in all_needed)
    tight, savings = estimate.settle(own, CPU, int(least / (1 - estimate.MARGIN)) + 2)
    assert savings.recomputed
    assert tight.peak <= least + 2
    with pytest.raises(ResourceError, match=r"--memory-budget 0\.001M is too small") as caught:
        estimate.settle(own, CPU, 1000)
    assert caught.value.exit_code == 6
    assert "the smallest that works is 10M" in caught.value.hint
    assert estimate.settle(own, CPU, 10**7)


def test_too_small_a_machine_saves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sizes((0, 1, 2), Tiny(C=64, F=512, H=8))
    costs = replace(estimate.measure(own, CPU), peak=0, in_use=0, evaluation=0)
    monkeypatch.setattr(estimate, "measure", lambda *_: costs)
    monkeypatch.setattr(estimate, "WORKSPACE_BYTES", 0)
    full, needed = (
        estimate.memory(own, CPU),
        [estimate.add_up(own, costs, savings) for savings in ladder(own.plan, own.teacher_plan, own.conversion)],
    )
    has = replace(costs, available=int(0.8 * full.peak))
    monkeypatch.setattr(estimate, "measure", lambda *_: has)
    tight, savings = estimate.settle(own, CPU, None)
    assert (tight.budget, tight.fits, savings.on_disk) == (None, True, True)
    assert tight.ahead <= has.available
    estimate.check_fits(own, CPU, tight)
    _, of_two = estimate.settle(replace(own, sharding=Sharding(2, 2)), CPU, None)
    assert not of_two.on_disk, "several processes can't save"
    none = replace(costs, available=min(rung.ahead for rung in needed) - 1)
    monkeypatch.setattr(estimate, "measure", lambda *_: none)
    least, _ = estimate.settle(own, CPU, None)
    with pytest.raises(ResourceError, match="even with layers streamed from the file") as caught:
        estimate.check_fits(own, CPU, least)
    assert caught.value.exit_code == 6


def test_in_words() -> None:
    own = sizes((2, 3), Tiny(layers=4))
    rungs = list(ladder(own.plan, None, own.conversion))
    words = [describe(savings, own.plan, None, own.conversion) for savings in (rungs[0], rungs[-1])]
    assert words == [
        "0 of 4 layers streamed, 0 of 2 layers recomputed, best state on disk",
        "4 of 4 layers streamed, 1 of 2 layers recomputed, best state and optimizer moments on disk",
    ]


# The command


def test_the_log_and_the_dry_run_tell(tmp_path: Path) -> None:
    place = furnished_for_a_process(tmp_path)
    told = place.run("--dry-run", "--json", "--progress", "none", "--memory-budget", "1.5GiB")
    assert told.returncode == 0, told.stderr
    forecast = json.loads(told.stdout)
    assert forecast["memory"]["budget"] == 1.5 * 2**30
    assert forecast["savings"] == "0 of 2 layers streamed, 0 of 2 layers recomputed, best state on disk"
    refused = place.run("--memory-budget", "1M")
    assert refused.returncode == 6
    assert "--memory-budget 1M is too small" in refused.stderr
    assert "the smallest that works is" in refused.stderr
    assert not place.out.exists()


def test_the_plan_is_told(tmp_path: Path) -> None:
    events: list[Event] = []
    polished(furnished(tmp_path, MODELS["plain"]), events.append, compute_memory_budget=ROOMY)
    details = [event.detail for event in events if isinstance(event, StageEvent) and event.stage == "replica"]
    assert "0 of 4 layers streamed, 0 of 4 layers recomputed, best state on disk" in details[0]


def test_a_machine_with_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes without being asked for, and a warning and the report say how."""
    folder = furnished(tmp_path, MODELS["plain"])
    without = polished(folder)
    plan = Report.read(folder / "out.cmf.report.json").memory.plan
    assert plan is not None
    assert (plan.best_state, plan.moments, plan.layers_streamed, plan.budget_bytes) == ("memory", "memory", 0, None)
    measure = estimate.measure

    def little(sizes: Sizes, device: torch.device) -> Costs:
        costs = replace(measure(sizes, device), available=10**9)
        rungs = list(ladder(sizes.plan, sizes.teacher_plan, sizes.conversion))
        least = min(estimate.add_up(sizes, costs, savings).ahead for savings in rungs)
        return replace(costs, in_use=costs.in_use, available=int((least + 2000) / (1 - estimate.MARGIN)) - costs.in_use)

    monkeypatch.setattr(estimate, "measure", little)
    monkeypatch.setattr(estimate, "MARGIN", 0.0)
    assert polished(folder) == without
    report = Report.read(folder / "out.cmf.report.json")
    assert any("memory is too small to hold everything" in warning for warning in report.warnings)
    plan = report.memory.plan
    assert plan is not None
    assert (plan.best_state, plan.budget_bytes) == ("disk", None)


def test_the_report_tells_the_plan(rung: dict[str, Any], tmp_path: Path) -> None:
    folder = furnished(tmp_path, MODELS["plain"])
    rung.update(at=-1)
    polished(folder, compute_memory_budget=ROOMY, o1_layers="deep2")
    plan = Report.read(folder / "out.cmf.report.json").memory.plan
    assert plan is not None
    assert (plan.budget_bytes, plan.teacher_layers_streamed) == (ROOMY, None)
    assert (plan.layers_streamed, plan.layers_recomputed) == (4, 1)
    assert (plan.best_state, plan.moments) == ("disk", "disk")
    assert plan.estimated_bytes > 0


def test_reading_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.io import reader
    from cortiq_fcd.io.reader import open_model
    from cortiq_fcd.stages.dequantize import Unpacker

    path = Tiny(layers=1).write(tmp_path / "m.cmf")
    asked: list[bool] = []
    chunks = reader.CmfModel.chunks
    monkeypatch.setattr(
        reader.CmfModel,
        "chunks",
        lambda self, name, check_hash=False: asked.append(check_hash) or chunks(self, name, check_hash=check_hash),
    )
    with open_model(path) as model:
        fill = Unpacker(model)
        name = "model.layers.0.mlp.up_proj.weight"
        out = torch.empty(model.tensors[name].shape)
        for _ in range(3):
            out.fill_(np.nan)
            fill(name, out)
            assert torch.equal(out, torch.from_numpy(model.decode(name)))
    assert asked == [True, False, False]


def test_reading_streamed_layers_takes_time(tmp_path: Path) -> None:
    from cortiq_fcd.io.reader import open_model
    from cortiq_fcd.stages import durations

    model = MODELS["plain"]
    own = sizes((2, 3), model)
    first, *_, last = ladder(own.plan, None, own.conversion)
    with open_model(model.write(tmp_path / "m.cmf")) as opened:
        assert durations._reading_seconds(own, first, opened, CPU) == 0
        assert durations._reading_seconds(own, last, opened, CPU) > 0
