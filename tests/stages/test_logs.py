"""Logs for other programs: what is in them, and that they can't take a run down."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.events import EvalEvent, GateEvent, StepEvent, WarningEvent
from cortiq_fcd.stages import pipeline
from cortiq_fcd.stages.logs import JsonLinesLog, numbers_of
from cortiq_fcd.stages.report import Report
from tests.stages.test_pipeline import furnished, settings

SHORT: dict[str, Any] = {"train_steps": 3, "train_eval_every": 0, "gate_enabled": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnished(tmp_path)


def run(folder: Path, **changes: Any) -> Report:
    return pipeline.run(folder / "in.cmf", folder / "out.cmf", settings(folder, **SHORT, **changes))


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Of TensorBoard event files: length (8 bytes), checksum (4), event, checksum (4), and so on."""
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def test_json_lines(folder: Path) -> None:
    report = run(folder, output_log_jsonl=folder / "log.jsonl")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["_step"] for line in lines] == [0, 1, 2, 3, 3]
    assert [line["train/ce"] for line in lines if "train/ce" in line] == [loss.ce for loss in report.losses]
    assert [line["val/ppl"] for line in lines if "val/ppl" in line] == [entry.ppl for entry in report.evals]
    assert all(line["_timestamp"] > 0 for line in lines)


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama"}', '{\n  "_step": 1\n}', "\n", "{" * 100_000, '{"a": 1}\n' * 9]
)
def test_json_of_another_kind_does_not_grow(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="something else than a log"):
        JsonLinesLog(tmp_path / "config.json").write(1, {"train/ce": 1.0})
    assert (tmp_path / "config.json").read_text() == text


def test_a_log_grows(tmp_path: Path) -> None:
    for step in (1, 2):
        log = JsonLinesLog(tmp_path / "log.jsonl")
        log.write(step, {"train/ce": 1.0})
        log.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["_step"] for line in lines] == [1, 2]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "log.jsonl")
    log.write(1, {"train/ce": float("nan"), "train/kl": None})
    log.close()
    assert '"train/ce": null, "train/kl": null' in (tmp_path / "log.jsonl").read_text()


def test_tensorboard(folder: Path) -> None:
    pytest.importorskip("tensorboardX")
    report = run(folder, output_tensorboard=folder / "board")
    found = scalars(folder / "board")
    assert [(step, value) for step, tag, value in found if tag == "train/kl"] == [
        (loss.step, pytest.approx(loss.kl)) for loss in report.losses
    ]
    assert [step for step, tag, _ in found if tag == "val/ppl"] == [0, 3]


def test_a_log_that_fails_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("cortiq_fcd.stages.places.check_logs", lambda _: None)  # it goes wrong only later
    (folder / "notes.txt").write_text("dear diary")
    report = run(folder, output_log_jsonl=folder / "notes.txt", output_tensorboard=folder / "board")
    assert report.steps_run == 3
    assert (folder / "notes.txt").read_text() == "dear diary"
    told = [warning for warning in report.warnings if "the log ends here, the run goes on" in warning]
    assert len(told) == 2
    assert "holds something else than a log of steps" in told[0]
    assert "pip install 'cortiq-fcd[tensorboard]'" in told[1]


@pytest.mark.parametrize(
    ("field", "name", "words"),
    [
        ("output_log_jsonl", "none/log.jsonl", "there is no folder"),
        ("output_log_jsonl", ".", "not a regular file"),
        ("output_log_jsonl", "notes.txt", "something else than a log"),
        ("output_log_jsonl", "notes.txt/log.jsonl", "there is no folder"),
        ("output_log_jsonl", "loop", "regular file|symbolic links"),
        ("output_log_jsonl", "/proc/version", "something else than a log"),
        ("output_tensorboard", "notes.txt", "is not a folder"),
        ("output_tensorboard", "notes.txt/board", "is not a folder"),
        ("output_tensorboard", "loop/board", "is not a folder"),
    ],
)
def test_a_log_that_could_never_be_kept_is_refused_at_the_start(
    folder: Path, field: str, name: str, words: str
) -> None:
    (folder / "notes.txt").write_text("dear diary")
    (folder / "loop").symlink_to(folder / "loop")
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=words) as caught:
        run(folder, **{field: folder / name})
    assert caught.value.message.startswith(("--log-jsonl ", "--tensorboard "))
    assert caught.value.hint
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["in.cmf", "out.cmf", "out.cmf.report.json", "train.txt", "out.cmf.partial/log"])
def test_places_of_the_run_are_no_places_for_logs(folder: Path, name: str) -> None:
    for field in ("output_log_jsonl", "output_tensorboard"):
        with pytest.raises(ConfigError, match=r"--log-jsonl|--tensorboard"):
            run(folder, **{field: folder / name})


def test_numbers_of_events() -> None:
    step = StepEvent(step=2, steps=9, ce=3.0, kl=0.5, grad_norm=1.0, seconds=0.5, tokens=1024)
    numbers = {"train/ce": 3.0, "train/kl": 0.5, "train/grad_norm": 1.0, "train/tokens_per_s": 2048.0}
    assert numbers_of(step) == (2, numbers)
    evaluation = EvalEvent(step=2, ppl=9.0, teacher_ppl=8.0, start_ppl=10.0, best_step=None, best_ppl=None)
    assert numbers_of(evaluation) == (2, {"val/ppl": 9.0, "val/best_ppl": None})
    gate = GateEvent(step=2, scores=[0.1, 0.4], passed=False)
    assert numbers_of(gate) == (2, {"gate/worst_loop_score": 0.4, "gate/passed": 0.0})
    assert numbers_of(WarningEvent(message="careful")) is None
