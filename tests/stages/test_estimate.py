"""Memory, disk and time before the first step: held against a real run, and refused when there is no room."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.replica import loss_and_gradient
from cortiq_fcd.stages import capacity, durations, estimate, miniature, pipeline
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.miniature import Miniatures, peak_bytes, seconds
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.savings import no_savings
from cortiq_fcd.stages.tally import Tally
from cortiq_fcd.stages.works import Sizes
from tests.fixtures import LINEAR, Tiny
from tests.stages.killing import furnished as furnished_for_a_process
from tests.stages.test_pipeline import furnished, settings

CPU = torch.device("cpu")
IDS = torch.zeros(2, 40, dtype=torch.int64)


def sizes(layers: tuple[int, ...] = (0, 1, 2), batch: int = 2) -> Sizes:
    conversion = Conversion(layers, "all", m=4, w=5, sink=2, seal=20)
    return Sizes(Tiny().plan(), None, conversion, TrainConfig(batch=batch, seq=40, steps=50), 3, 400, 60)


def test_a_tally_counts_what_is_alive() -> None:
    given = torch.zeros(1000)
    with Tally() as tally:
        a = given + 1  # 4000 bytes
        b = a.view(10, 100)  # no more
        c = b.T @ b  # 40000
        del a, b
        del c
        d = given[:500].mul_(2)  # none: the storage was there before
        e = torch.zeros(100)  # 400, after the others are gone
    assert tally.peak_bytes == 44000
    assert len(d) + len(e) == 600


HYBRID = {"layer_types": ["LinearAttention", "FullAttention", "LinearAttention", "FullAttention"], **LINEAR}


@pytest.mark.parametrize(
    ("model", "trained", "within"),
    [
        (Tiny(layers=6), (0, 1, 2, 3, 4, 5), 0.1),
        (Tiny(layers=6), (4, 5), 0.1),
        (Tiny(layers=7), (1, 3, 6), 0.1),
        (Tiny(layers=4, arch=HYBRID), (1, 3), 0.25),  # kinds peak in different places
        (Tiny(layers=4, arch={"num_loops": 2}), (2, 3), 0.1),
    ],
)
def test_a_few_layers_tell_the_memory_of_all(model: Tiny, trained: tuple[int, ...], within: float) -> None:
    conversion = Conversion(trained, "all", m=4, w=5, sink=2, seal=20)
    replica = model.replica(conversion)
    with Tally() as tally:
        loss_and_gradient(replica, IDS, IDS, 0.7)
    miniatures = Miniatures(model.plan(), None, conversion, CPU, blank=True)
    told = miniatures.of_all(lambda small: loss_and_gradient(small, IDS, IDS, 0.7), peak_bytes)
    assert told == pytest.approx(tally.peak_bytes, rel=within)


def test_a_few_layers_tell_the_time_of_all() -> None:
    """Loosely: the machine may be busy."""
    conversion = Conversion(tuple(range(12)), "all", m=4, w=5, sink=2, seal=20)
    model = Tiny(layers=12)
    miniatures = Miniatures(model.plan(), None, conversion, CPU, blank=False)
    told = miniatures.of_all(lambda small: loss_and_gradient(small, IDS, IDS, 0.7), seconds)
    real = seconds(lambda _: model.replica(conversion), (), lambda r: loss_and_gradient(r, IDS, IDS, 0.7))
    assert real / 3 < told < real * 3


def test_a_large_step_is_scaled_up_from_some_of_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so; what takes long is tried once."""
    monkeypatch.setattr(durations, "MOST_POSITIONS", 80)
    tried: list[int] = []
    real = durations.step_of
    monkeypatch.setattr(durations, "step_of", lambda train, device: tried.append(train.batch) or real(train, device))
    large = sizes(batch=6)
    time = durations.duration(large, no_savings(large.conversion, None), None, CPU)
    assert (tried, time.tried, time.windows) == ([2], 2, 6)
    assert durations.what_is_tried(large.train) == "2 of the 6 windows of a step"
    assert durations.windows_tried(large.train.model_copy(update={"batch": 1})) == 1
    monkeypatch.setattr(miniature, "SLOW_S", 0.0)
    calls: list[int] = []
    replica = Tiny().replica(large.conversion)
    seconds(lambda _: replica, (), lambda _: calls.append(1))
    assert len(calls) == 1


def test_memory_adds_up() -> None:
    now = estimate.memory(sizes(), CPU)
    weights = 4 * 3 * (2 * 16 + 3 * 24 * 16)
    assert (now.masters, now.gradient, now.moments, now.best) == (weights, weights, 2 * weights, weights)
    assert now.frozen == 4 * Tiny().plan().params
    assert now.peak >= now.process + now.frozen + 5 * weights + now.activations
    assert now.fits
    assert not replace(now, available=now.ahead - now.in_use - 1).fits


def test_a_checkpoint_is_told_beside_a_step_only_where_a_slow_disk_may_keep_it() -> None:
    """What is told is what happens on a usual disk; what must be there is what may happen on any."""
    costs = estimate.Costs(1000, 0, None, alone=10.0**6, each={}, evaluation=0)
    settled = sizes()
    now = estimate.add_up(settled, costs, no_savings(settled.conversion, None))
    assert now.peak == now.always + max(now.activations, now.checkpoint_copy)
    assert settled.train.eval_every < settled.train.steps
    assert now.ahead == now.always + now.activations + now.checkpoint_copy


def check_memory(sizes: Sizes, device: torch.device) -> None:
    needed, _ = estimate.settle(sizes, device, None)
    estimate.check_fits(sizes, device, needed)


def test_too_big_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = estimate.memory(sizes(batch=1), CPU)
    monkeypatch.setattr(estimate, "_machine", lambda device: (needed.in_use, needed.ahead - needed.in_use))
    check_memory(sizes(batch=1), CPU)
    with pytest.raises(ResourceError) as caught:
        check_memory(sizes(batch=64), CPU)
    assert caught.value.exit_code == 6
    assert f"{needed.ahead - needed.in_use:,} more are available" in caught.value.message
    assert "--batch " in caught.value.hint
    monkeypatch.setattr(estimate, "_machine", lambda device: (0, 1000))
    with pytest.raises(ResourceError, match="needs about") as caught:
        check_memory(sizes(), CPU)
    assert "not even one layer" in caught.value.hint


def test_a_run_that_does_not_fit_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = furnished(tmp_path)
    monkeypatch.setattr(estimate, "available_bytes", lambda: 1000)
    before = sorted(folder.iterdir())
    with pytest.raises(ResourceError):
        pipeline.run(folder / "in.cmf", folder / "out.cmf", settings(folder))
    assert sorted(folder.iterdir()) == before


# What the machine has


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and a /sys/fs/cgroup of our own."""
    monkeypatch.setattr(capacity, "PROC", tmp_path / "proc")
    monkeypatch.setattr(capacity, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups(system: Path) -> None:
    assert capacity.available_bytes() == 8000 * 1024


def test_cgroup_v2(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/a/b\n")
    write(system / "cgroup/a/b/memory.max", "max\n")
    write(system / "cgroup/a/memory.max", "5000000\n")
    write(system / "cgroup/a/memory.current", "3000000\n")
    write(system / "cgroup/a/memory.stat", "anon 1\ninactive_file 1000000\n")
    assert capacity.available_bytes() == 3_000_000


def test_cgroup_v1_in_a_container(system: Path) -> None:
    """The path is the host's; the container sees its own group as the root."""
    write(system / "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    write(system / "cgroup/memory/memory.limit_in_bytes", "4000000\n")
    write(system / "cgroup/memory/memory.usage_in_bytes", "3999000\n")
    write(system / "cgroup/memory/memory.stat", "total_inactive_file 500\n")
    assert capacity.available_bytes() == 1500


def test_no_limit_in_v1(system: Path) -> None:
    write(system / "proc/self/cgroup", "4:memory:/\n")
    write(system / "cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(system / "cgroup/memory/memory.usage_in_bytes", "3999000\n")
    assert capacity.available_bytes() == 8000 * 1024


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "PROC", tmp_path / "none")
    assert (capacity.available_bytes(), capacity.resident_bytes()) == (None, 0)


# The command


def test_a_dry_run_tells_what_a_run_needs_and_writes_nothing(tmp_path: Path) -> None:
    place = furnished_for_a_process(tmp_path)
    before = sorted(tmp_path.iterdir())
    told = place.run("--dry-run", "--json", "--progress", "none")
    assert told.returncode == 0, told.stderr
    assert sorted(tmp_path.iterdir()) == before
    forecast = json.loads(told.stdout)
    assert (forecast["layers"], forecast["trainable_params"]) == ([0, 1], 2 * (2 * 16 + 3 * 24 * 16))
    assert forecast["resumes_after_step"] is None
    assert min(forecast["time"][name] for name in ("step", "validation", "gate", "before", "after", "total")) > 0
    assert math.isfinite(forecast["time"]["total"])
    ran = place.run("--json")
    assert ran.returncode == 0, ran.stderr
    report = Report.model_validate_json(ran.stdout)
    assert forecast["memory"]["peak"] == pytest.approx(report.memory.peak_rss_bytes, rel=0.15)
    assert forecast["disk"]["out"] <= place.out.stat().st_size < forecast["disk"]["out"] + 4096


def test_a_dry_run_for_people(tmp_path: Path) -> None:
    place = furnished_for_a_process(tmp_path)
    told = subprocess.run(place.command("--dry-run", "-q"), capture_output=True, text=True, check=False)
    assert told.returncode == 0
    assert all(line.startswith("warning: ") for line in told.stderr.splitlines()), "-q leaves warnings alone"
    for words in ("layers trained       2: 0-1", "memory, at most", "disk free", "a step"):
        assert words in told.stdout
    assert ", with the gate" in told.stdout
    ungated = subprocess.run(place.command("--dry-run", "-q", "--no-gate"), capture_output=True, text=True, check=False)
    assert "a validation" in ungated.stdout
    assert ", with the gate" not in ungated.stdout


def test_the_peak_is_this_programs_own() -> None:
    """A small program that a large one starts must not report the large one's memory (ru_maxrss does)."""
    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    command = "from cortiq_fcd.stages.capacity import peak_resident_bytes as peak; print(peak())"
    told = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert 0 < int(told.stdout) < len(held)
