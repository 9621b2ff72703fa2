"""What other programs read: report, record, events and log of real runs, against the committed schemas."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cortiq_fcd.cli import exits
from cortiq_fcd.io.reader import open_model
from tests.tiny_model import write_ids, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--o1-m 4 --o1-window 2 --o1-sink 0 --seq 32 --threads 1 --progress json --json"
OUTCOMES = {
    "polished, judged": (1200, "--steps 2 --lr 1e-2 --gate-threshold 1 --gate-slack 1", "polished", "ran"),
    "polished, gate skipped": (400, "--steps 2 --lr 1e-2", "polished", "skipped"),
    "identity, rejected": (1200, "--steps 2 --lr 1e-2 --gate-threshold 0", "identity", "ran"),
    "polish-only": (400, "--steps 2 --lr 1e-2 --polish-only", "polished", "skipped"),
}


def validator(name: str) -> Any:
    schema = json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def arguments(folder: Path, val_tokens: int, more: str) -> list[str]:
    model, out = write_tiny_model(folder / "in.cmf"), folder / "out.cmf"
    train, val = write_ids(folder / "train.npy", 2000), write_ids(folder / "val.npy", val_tokens, seed=1)
    return [
        "polish",
        *map(str, (model, out)),
        *SMALL.split(),
        "--corpus",
        str(train),
        "--val-corpus",
        str(val),
        *more.split(),
    ]


def strictly(text: str) -> Any:
    """JSON without NaN and its like."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check_events(lines: list[str]) -> list[dict[str, Any]]:
    events = [strictly(line) for line in lines]
    for event in events:
        validator("event").validate(event)
    return events


def check_result(stdout: str, out: Path) -> dict[str, Any]:
    report: dict[str, Any] = strictly(stdout)
    validator("report").validate(report)
    assert report == strictly(out.with_name("out.cmf.report.json").read_text(encoding="utf-8"))
    with open_model(out) as model:
        validator("provenance").validate(model.header["provenance"]["fcd"])
    return report


@pytest.mark.parametrize(("val_tokens", "more", "outcome", "gate"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_outcomes(
    val_tokens: int, more: str, outcome: str, gate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.run(arguments(tmp_path, val_tokens, more)) == 0
    captured = capsys.readouterr()
    report = check_result(captured.out, tmp_path / "out.cmf")
    assert (report["outcome"], report["gate"]["status"]) == (outcome, gate)
    assert report["recipe"]["polish_only"] == ("--polish-only" in more)
    events = check_events(captured.err.splitlines())
    kinds = {event["event"] for event in events}
    assert kinds >= {"stage", "step", "eval", "done"}
    assert ("gate" in kinds) == (gate == "ran")
    assert exits.run(["report", str(tmp_path / "out.cmf"), "--json"]) == 0
    assert strictly(capsys.readouterr().out) == report


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    words = arguments(tmp_path, 400, "--steps 100000 --eval-every 0")
    command = [sys.executable, "-m", "cortiq_fcd", *words]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT) as child:
        assert child.stderr is not None
        assert child.stdout is not None
        for line in child.stderr:
            lines.append(line)
            if '"event":"step"' in line:
                child.send_signal(signal.SIGINT)
                break
        lines += child.stderr.readlines()
        assert child.stdout.read() == ""
    assert child.returncode == 130
    events = check_events([line for line in lines if line.startswith("{")])
    assert "done" not in {event["event"] for event in events}
    assert not (tmp_path / "out.cmf").exists()
    steps = max(event["step"] for event in events if event["event"] == "step")
    assert f"the state after step {steps} is saved" in "".join(lines)


def test_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages import pipeline

    words = arguments(tmp_path, 1200, "--steps 4 --eval-every 2 --gate-threshold 1 --gate-slack 1 --lr 1e-2")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out.cmf")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_write", full)
        assert exits.run(words) == 6
    capsys.readouterr()
    assert exits.run([*words, "--resume"]) == 0
    captured = capsys.readouterr()
    report = check_result(captured.out, tmp_path / "out.cmf")
    assert report["steps_run"] == 4
    assert report["gate"]["texts"]["prompts"]
    assert any("step 4" in warning for warning in report["warnings"])
    check_events(captured.err.splitlines())
