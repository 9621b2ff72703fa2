"""Checkpoints: what is in them, which one is used, what is said about the others, and what goes away when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cortiq_fcd.errors import CmfFormatError, ConfigError, NothingPassedError, ResourceError
from cortiq_fcd.events import EvalEvent, Event, StageEvent, StepEvent, WarningEvent, ignore
from cortiq_fcd.stages import pipeline, provenance
from cortiq_fcd.stages.interrupt import Interrupted, Interruption
from cortiq_fcd.stages.report import Report
from tests.fixtures import Tiny, tiny_text, tiny_tokenizer, write_arrays
from tests.stages.test_pipeline import MODEL, STEPS, furnished, settings

Listen = Callable[[Event], None]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = furnished(tmp_path_factory.mktemp("undisturbed"))
    polished(folder)
    return (folder / "out.cmf").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnished(tmp_path)


def polished(
    folder: Path, listener: Listen = ignore, interruption: Interruption | None = None, **changes: Any
) -> Report:
    config = settings(folder, **{"gate_enabled": False, **changes})
    return pipeline.run(folder / "in.cmf", folder / "out.cmf", config, listener, interruption)


def interrupted(folder: Path, *, step: int, **changes: Any) -> None:
    """A run that is asked to stop in this step."""
    asked = Interruption()

    def listener(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == step:
            asked.requested = signal.SIGINT

    with pytest.raises(Interrupted) as caught:
        polished(folder, listener, asked, **changes)
    assert (caught.value.signal, caught.value.saved_step) == (signal.SIGINT, step)


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "out.cmf.partial").glob("checkpoint-*.json"))


def steps_of(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["body"]["record"]["step"] for path in checkpoints(folder)]


def is_done(folder: Path, undisturbed: bytes) -> bool:
    hidden = [path for path in folder.iterdir() if path.name.startswith(".") or path.name.endswith(".partial")]
    return (folder / "out.cmf").read_bytes() == undisturbed and not hidden


# Going on


def test_interrupted_in_every_step(folder: Path, undisturbed: bytes) -> None:
    for step in range(1, STEPS + 1):
        interrupted(folder, step=step)
    events: list[Event] = []
    report = polished(folder, events.append)
    assert is_done(folder, undisturbed)
    assert [loss.step for loss in report.losses] == list(range(1, STEPS + 1))
    assert [e.step for e in report.evals] == [0, 2, 4, 6]
    assert not [e for e in events if isinstance(e, (StepEvent, EvalEvent))]
    assert any(f"resumed after step {STEPS}" in warning for warning in report.warnings)


def test_what_was_measured_before_is_not_measured_again(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    polished(furnished(tmp_path / "other"), gate_enabled=True)
    interrupted(folder, step=3, gate_enabled=True)
    events: list[Event] = []
    report = polished(folder, events.append, gate_enabled=True)
    assert is_done(folder, (tmp_path / "other/out.cmf").read_bytes())
    assert [e.stage for e in events if isinstance(e, StageEvent) and e.seconds is None] == [
        "prepare", "dequantize", "replica", "polish", "evaluate", "provenance",
    ]  # fmt: skip
    assert [e.step for e in events if isinstance(e, StepEvent)] == [4, 5, 6]
    assert len(report.gate.baseline or []) == len(report.gate.teacher or []) == 3
    assert report.ppl.final_windows.teacher is not None


def test_a_checkpoint_is_readable_by_others(folder: Path) -> None:
    interrupted(folder, step=3)
    assert steps_of(folder) == [2, 3]
    tensors = load_file(checkpoints(folder)[-1].with_suffix(".safetensors"))
    assert set(tensors) == {"masters", "first", "second", "best"}
    assert {tensor.shape for tensor in tensors.values()} == {(2 * (2 * 16 + 3 * 24 * 16),)}


def test_every_minute(folder: Path) -> None:
    """No minutes at all between checkpoints: one a step."""
    interrupted(folder, step=5, train_eval_every=0, output_checkpoint_minutes=0.0)
    assert steps_of(folder) == [4, 5]


def test_skipped_steps_are_told_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages import polish
    from tests.stages.test_polish import broken_at

    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({1}))
    interrupted(folder, step=3)
    monkeypatch.undo()
    assert "step 1: the gradient is not finite, the step was skipped" in polished(folder).warnings


def test_figures_that_were_not_measured_survive(folder: Path) -> None:
    """A seal at the end of the windows: the figures of served positions are NaN inside, null in the report."""
    interrupted(folder, step=3, o1_prefill=40)
    assert polished(folder, output_resume=True, o1_prefill=40).ppl.served.start is None


def test_a_dry_run_tells_where_it_would_go_on(folder: Path) -> None:
    interrupted(folder, step=3)
    config = settings(folder, gate_enabled=False)
    assert pipeline.dry_run(folder / "in.cmf", folder / "out.cmf", config).resumes_after_step == 3
    assert steps_of(folder) == [2, 3]


# Damage


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_is_told_and_the_older_one_used(
    damage: Callable[[Path], None], suffix: str, folder: Path, undisturbed: bytes
) -> None:
    interrupted(folder, step=3)
    damage(checkpoints(folder)[-1].with_suffix(suffix))
    events: list[Event] = []
    report = polished(folder, events.append)
    assert [e.step for e in events if isinstance(e, StepEvent)] == [3, 4, 5, 6]
    assert any("checkpoint-000002 is" in w and ("damaged" in w or "incomplete" in w) for w in report.warnings)
    assert is_done(folder, undisturbed)


def test_all_checkpoints_damaged(folder: Path, undisturbed: bytes) -> None:
    interrupted(folder, step=3)
    for path in checkpoints(folder):
        flipped(path)
    with pytest.raises(ConfigError, match="--resume"):
        polished(folder, output_resume=True)
    events: list[Event] = []
    report = polished(folder, events.append)
    assert "the run starts over" in report.warnings
    assert [e.step for e in events if isinstance(e, StepEvent)] == [1, 2, 3, 4, 5, 6]
    assert is_done(folder, undisturbed)


# Another run's checkpoint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_steps": 7}, "train.steps was 6, is 7"),
        ({"train_lr": 1e-3}, "train.lr was 0.002, is 0.001"),
        ({"o1_layers": "deep1"}, "o1.layers"),
        ({"gate_threshold": 0.5}, "gate.threshold was 1.0, is 0.5"),
        ({"corpus_max_train_bytes": 2000}, "the training text"),
    ],
)
def test_the_field_that_differs_is_named(changes: dict[str, Any], words: str, folder: Path) -> None:
    interrupted(folder, step=3)
    with pytest.raises(ConfigError) as caught:
        polished(folder, output_resume=True, **changes)
    assert caught.value.exit_code == 2
    assert words in caught.value.message
    assert steps_of(folder) == [2, 3]
    report = polished(folder, **changes)
    assert any(words in warning for warning in report.warnings)
    assert "the run starts over" in report.warnings
    assert report.losses[0].step == 1


def test_another_source_is_another_run(folder: Path) -> None:
    interrupted(folder, step=3)
    write_arrays(
        folder / "in.cmf", MODEL.header(), Tiny(layers=2, seed=6).arrays(), tokenizer=tiny_tokenizer(), force=True
    )
    with pytest.raises(ConfigError, match="the source file was"):
        polished(folder, output_resume=True)


@pytest.mark.parametrize("changes", [{"output_save_dtype": "f16"}, {"output_force": True}])
def test_what_only_concerns_the_result_may_change(changes: dict[str, Any], folder: Path) -> None:
    interrupted(folder, step=3)
    polished(folder, output_resume=True, **changes)


def test_another_runs_checkpoint_stays_until_two_new_ones_are_there(folder: Path, undisturbed: bytes) -> None:
    interrupted(folder, step=3)
    interrupted(folder, step=1, train_lr=1e-3)
    assert steps_of(folder) == [3, 1]
    report = polished(folder, output_resume=True)
    assert any("resumed after step 3" in warning for warning in report.warnings)
    assert is_done(folder, undisturbed)


def test_restart(folder: Path, undisturbed: bytes) -> None:
    interrupted(folder, step=3)
    events: list[Event] = []
    polished(folder, events.append, output_resume=False)
    assert [e.step for e in events if isinstance(e, StepEvent)] == [1, 2, 3, 4, 5, 6]
    assert is_done(folder, undisturbed)


def test_nothing_to_resume(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        polished(folder, output_resume=True)
    assert "there is none" in caught.value.message
    assert not (folder / "out.cmf.partial").exists()


# The folder


def test_files_of_others_stay(folder: Path) -> None:
    partial = folder / "out.cmf.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("dear")
    events: list[Event] = []
    polished(folder, events.append)
    assert [path.name for path in partial.iterdir()] == ["mine.txt"]
    assert any("not this program's" in e.message for e in events if isinstance(e, WarningEvent))


def test_a_file_in_the_folders_place(folder: Path) -> None:
    (folder / "out.cmf.partial").write_text("dear")
    with pytest.raises(ConfigError):
        polished(folder)
    assert (folder / "out.cmf.partial").read_text() == "dear"


def test_two_runs_at_once(folder: Path) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 3:
            with pytest.raises(ConfigError, match="another run"):
                polished(folder)

    polished(folder, listener)


def test_killed_between_out_and_its_report(folder: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(provenance, "write_report", killed)
    with pytest.raises(KeyboardInterrupt):
        polished(folder)
    monkeypatch.undo()
    assert (folder / "out.cmf").read_bytes() == undisturbed
    with pytest.raises(ConfigError, match="exists already"):
        polished(folder, train_lr=1e-3)
    events: list[Event] = []
    assert polished(folder, events.append) == Report.read(folder / "out.cmf.report.json")
    assert not [e for e in events if isinstance(e, StepEvent)]
    assert is_done(folder, undisturbed)


def test_an_out_of_someone_else_is_not_replaced(folder: Path) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 3:
            (folder / "out.cmf").write_bytes(b"dear")

    with pytest.raises(ConfigError, match="exists already"):
        polished(folder, listener)
    with pytest.raises(ConfigError, match="exists already"):
        polished(folder)
    assert (folder / "out.cmf").read_bytes() == b"dear"


def test_require_pass_keeps_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages import gate

    monkeypatch.setattr(gate, "greedy", lambda replica, ids, *args, **kwargs: [[3] * 60 for _ in ids])
    with pytest.raises(NothingPassedError) as caught:
        polished(folder, gate_enabled=True, gate_threshold=0.35, gate_require_pass=True)
    assert "--require-pass" in caught.value.hint
    events: list[Event] = []
    assert polished(folder, events.append, gate_enabled=True, gate_threshold=0.35).outcome == "identity"
    assert not [e for e in events if isinstance(e, StepEvent)]


# Faults from outside


def at(stage: str, do: Callable[[], object], detail: str = "") -> Listen:
    def listener(event: Event) -> None:
        if isinstance(event, StageEvent) and event.stage == stage and event.seconds is None and detail in event.detail:
            do()

    return listener


def test_the_source_is_replaced(folder: Path, undisturbed: bytes) -> None:
    good = (folder / "in.cmf").read_bytes()
    (folder / "out.cmf").write_bytes(b"old")

    def replace() -> None:
        write_arrays(folder / "new.cmf", MODEL.header(), Tiny(layers=2, seed=6).arrays(), tokenizer=tiny_tokenizer())
        (folder / "new.cmf").replace(folder / "in.cmf")

    with pytest.raises(CmfFormatError, match="replaced by another model") as caught:
        polished(folder, at("polish", replace), output_force=True)
    assert caught.value.exit_code == 3
    assert (folder / "out.cmf").read_bytes() == b"old"
    (folder / "in.cmf").write_bytes(good)
    polished(folder, output_force=True, output_resume=True)
    assert is_done(folder, undisturbed)


def test_the_source_is_changed_in_place(folder: Path) -> None:
    def change() -> None:
        with (folder / "in.cmf").open("r+b") as file:
            file.truncate(5000)

    with pytest.raises(CmfFormatError) as caught:
        polished(folder, at("polish", change))
    assert caught.value.exit_code == 3
    assert not (folder / "out.cmf").exists()


def test_the_source_is_replaced_by_itself(folder: Path, undisturbed: bytes) -> None:
    def replace() -> None:
        (folder / "new.cmf").write_bytes((folder / "in.cmf").read_bytes())
        (folder / "new.cmf").replace(folder / "in.cmf")

    polished(folder, at("polish", replace))
    assert is_done(folder, undisturbed)


def test_a_clock_that_is_set_back(folder: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    interrupted(folder, step=3)
    polished(folder)
    assert is_done(folder, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mounts a small file system in a folder."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)

    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_disk_full_of_checkpoints(folder: Path, undisturbed: bytes, small_disk: Callable[[Path, str], None]) -> None:
    """The run goes on, and says which checkpoint is missing."""
    small_disk(folder / "out.cmf.partial", "size=16k")
    report = polished(folder)
    assert any("the checkpoint of step 2 could not be saved" in warning for warning in report.warnings)
    assert any("No space left" in warning for warning in report.warnings)
    assert (folder / "out.cmf").read_bytes() == undisturbed


def test_a_full_disk_at_the_end(folder: Path, undisturbed: bytes, small_disk: Callable[[Path, str], None]) -> None:
    disk = folder / "disk"
    small_disk(disk, "size=600k")
    (disk / "out.cmf").write_bytes(b"old")
    config = settings(folder, output_force=True, gate_enabled=False)

    def fill() -> None:
        data = np.zeros(1 << 20, np.uint8)
        with pytest.raises(OSError, match="No space"):
            (disk / "big").write_bytes(data.tobytes())

    with pytest.raises(ResourceError) as caught:
        pipeline.run(folder / "in.cmf", disk / "out.cmf", config, at("evaluate", fill, "after"))
    assert caught.value.exit_code == 6
    assert (disk / "out.cmf").read_bytes() == b"old"
    (disk / "big").unlink()
    events: list[Event] = []
    pipeline.run(folder / "in.cmf", disk / "out.cmf", config, events.append)
    assert not [e for e in events if isinstance(e, StepEvent)]
    assert (disk / "out.cmf").read_bytes() == undisturbed


def test_a_read_only_folder(folder: Path, small_disk: Callable[[Path, str], None]) -> None:
    small_disk(folder / "disk", "size=1m,ro")
    with pytest.raises(ResourceError) as caught:
        pipeline.run(folder / "in.cmf", folder / "disk" / "out.cmf", settings(folder))
    assert caught.value.exit_code == 6


def test_texts_count_by_what_they_hold(folder: Path, undisturbed: bytes) -> None:
    interrupted(folder, step=3)
    (folder / "moved.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    polished(folder, output_resume=True, corpus_train=folder / "moved.txt")
    assert is_done(folder, undisturbed)
