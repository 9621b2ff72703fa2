"""`eval` and `gate` on the command line: streams, exit codes, tables, and one JSON document."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from cortiq_fcd.cli import exits
from cortiq_fcd.stages.readings import EvalReport, GateReport
from tests.command_line import without_start
from tests.fixtures import tiny_text, tiny_tokenizer
from tests.stages.test_gating import O1
from tests.stages.test_pipeline import MODEL

Ran = tuple[int, str, str]
Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ran:
        before = signal.getsignal(signal.SIGTERM)
        try:
            code = exits.run([str(argument) for argument in arguments])
        finally:
            signal.signal(signal.SIGTERM, before)
        captured = capsys.readouterr()
        return code, captured.out, without_start(captured.err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    return MODEL.write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer(), provenance={"o1_attn": O1})


def flags(model: Path) -> list[object]:
    return ["--text", model.parent / "val.txt", "--seq", 40, "--threads", 1, "--precision", "f32"]


def test_eval_for_people(run: Run, model: Path) -> None:
    before = sorted(model.parent.iterdir())
    code, out, err = run("eval", model, *flags(model))
    assert code == 0
    assert out.startswith("Perplexity ")
    for words in (
        "served O(1)",
        "KL (nats)",
        "tokens/s",
        "layers all, 4 landmarks, window 5, sink 2",
        "12 windows of 40",
        "on cpu f32, 1 thread\n",
    ):
        assert words in out
    assert "evaluate" in err
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert sorted(model.parent.iterdir()) == before


def test_eval_for_programs(run: Run, model: Path) -> None:
    code, out, err = run("eval", model, *flags(model), "--json", "-q", "--windows", 3)
    found = EvalReport.model_validate_json(out)
    assert (code, err, found.windows.count) == (0, "", 3)
    _, out, err = run("eval", model, *flags(model), "--windows", 1)
    assert ": 1 window of 40" in out
    assert ": 1 window of 40" in err
    code, out, _ = run("eval", model, *flags(model), "--json", "-q", "--o1-m", 5, "--prefill", 25, "--batch", 1)
    found = EvalReport.model_validate_json(out)
    assert found.o1 is not None
    assert (found.o1.m, found.windows.prefill, found.windows.count) == (5, 25, 6)


def test_eval_sweeps_and_chooses(run: Run, model: Path) -> None:
    code, out, _ = run("eval", model, *flags(model), "--sweep", "--windows", 2, "-q")
    assert code == 0
    for words in ("no far field", "landmarks", "sinks", "At window 5, 4 landmarks cost least: "):
        assert words in out
    found = EvalReport.model_validate_json(run("eval", model, *flags(model), "--sweep", "--json", "-q")[1])
    assert found.sweep is not None
    assert {row.varied for row in found.sweep} == {"landmarks", "window", "sinks"}
    chosen = EvalReport.model_validate_json(run("eval", model, *flags(model), "--o1", "auto:1", "--json", "-q")[1])
    assert chosen.o1 is not None
    assert chosen.o1.costs is not None
    assert len(chosen.o1.costs) == MODEL.layers
    shown = run("eval", model, *flags(model), "--o1", "auto:1", "-q")[1]
    assert f"these layers cost least of {MODEL.layers}" in " ".join(shown.split())
    code, _, err = run("gate", model, *flags(model), "--o1", "auto:1")
    assert code == 2
    assert "layers are chosen by measurement in `polish` and `eval` alone" in err


def test_windows_are_as_many_as_the_text_holds(run: Run, model: Path) -> None:
    (model.parent / "val.txt").write_text(tiny_text(60, seed=2), encoding="utf-8")
    code, out, err = run("eval", model, *flags(model), "--json", "-q", "--windows", 1000000)
    assert (code, EvalReport.model_validate_json(out).windows.count) == (0, 20)
    assert "the text holds 20 different windows of 40 tokens: these are measured, not 1,000,000" in err


def test_what_is_no_cmf_file_has_a_hint(run: Run, model: Path) -> None:
    (model.parent / "notes.txt").write_text("dear diary " * 100)
    for arguments in (["gate", model, "--before", model.parent / "notes.txt"], ["eval", model.parent / "notes.txt"]):
        code, out, err = run(*arguments, *flags(model))
        assert (code, out) == (3, "")
        assert "notes.txt at byte 0: not a CMF file" in err
        assert "hint: `cortiq-fcd convert` makes a CMF file" in err


def test_settings_of_a_polish_fit(run: Run) -> None:
    """The demo's file says nothing about its attention, its settings do: the README's numbers."""
    data = files("cortiq_fcd") / "data"
    code, out, _ = run("eval", data / "demo.cmf", "--config", data / "demo.toml", "--json", "-q", "--windows", 2)
    assert code == 0
    found = EvalReport.model_validate_json(out)
    assert found.o1 is not None
    assert (found.o1.m, found.o1.w, found.windows.seq) == (16, 8, 256)


def test_gate_says_its_verdict_by_its_exit_code(run: Run, model: Path) -> None:
    code, out, _ = run("gate", model, *flags(model), "--gate-threshold", 1)
    assert code == 0
    assert out.startswith("Passed: through the served O(1) kernel ")
    for words in ("prompt ends", "exact", "tight loop", "rep-2", "steps of 0.018", "cpu f32, 1 thread\n"):
        assert words in out
    code, out, err = run("gate", model, *flags(model), "--gate-threshold", 0, "--json", "-q")
    found = GateReport.model_validate_json(out)
    assert (code, err, found.passed) == (10, "", False)
    assert run("gate", model, *flags(model), "--gate-threshold", 0)[1].startswith("Failed: ")


def test_gate_before(run: Run, model: Path) -> None:
    code, out, _ = run("gate", model, "--before", model, *flags(model), "--gate-threshold", 1, "--gate-slack", 0)
    assert code == 0
    assert "above the score before" in out
    code, _, err = run("gate", model, "--before", model.parent / "none.cmf", *flags(model))
    assert code == 2
    assert err.startswith("error: ")


def test_a_gate_that_can_not_run_has_not_passed(run: Run, model: Path) -> None:
    code, out, _ = run("gate", model, *flags(model), "--gate-profile", "strict")
    assert code == 10
    assert out.startswith("Not judged: the validation text of 1500 tokens has room for ")
    found = json.loads(run("gate", model, *flags(model), "--gate-profile", "strict", "--json", "-q")[1])
    assert (found["status"], found["passed"]) == ("skipped", None)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["eval", "none.cmf"], 2, "no such file"),
        (["gate", "none.cmf"], 2, "no such file"),
        (["eval", "IN", "--windows", "0"], 2, "--windows 0"),
        (["eval", "IN", "--steps", "3"], 2, "--steps"),
        (["eval", "IN", "--text", "none.txt"], 5, "none.txt"),
        (["gate", "IN", "--text", "none.txt"], 5, "none.txt"),
        (["gate", "IN", "--gate-profile", "severe"], 2, "--gate-profile"),
        (["eval", "IN", "--seq", "8"], 2, "--seq"),
    ],
)
def test_errors(run: Run, model: Path, arguments: list[str], code: int, words: str) -> None:
    got, out, err = run(*(model if argument == "IN" else argument for argument in arguments))
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert words in err
    assert "hint: " in err


@pytest.mark.parametrize("command", ["eval", "gate"])
def test_a_damaged_and_an_unsupported_file(run: Run, model: Path, command: str, tmp_path: Path) -> None:
    damaged = bytearray(model.read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "bad.cmf").write_bytes(damaged)
    code, out, err = run(command, tmp_path / "bad.cmf", *flags(model), "-q")
    assert (code, out) == (3, "")
    (tmp_path / "magic.cmf").write_bytes(b"GGUF" + bytes(200))
    assert run(command, tmp_path / "magic.cmf", *flags(model))[0] == 3
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["eval", "gate"])
@pytest.mark.parametrize("key", ["a_key_of_next_year", "moe", "hidden_act"])
def test_a_model_that_would_be_another_function_is_refused_by_name(
    run: Run, model: Path, command: str, key: str, tmp_path: Path
) -> None:
    """And `inspect` and `verify` still take it."""
    arch = dict(MODEL.header()["arch"]) | {key: {"x": 1}}
    other = MODEL.write(tmp_path / "other.cmf", arch=arch)
    code, out, err = run(command, other, *flags(model))
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].startswith(("error: ", "hint: "))
    assert f"arch.{key}" in err
    if command == "gate":
        code, out, err = run("gate", model, "--before", other, *flags(model))
        assert (code, out) == (4, "")
        assert f"arch.{key}" in err
    assert run("inspect", other)[0] == run("verify", other)[0] == 0
