"""What users and their machines can do to the command line: no traceback, a plain message, the right code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cortiq_fcd.cli import exits
from cortiq_fcd.display.figures import printable_json
from cortiq_fcd.display.plain import Plain, Warnings
from cortiq_fcd.events import WarningEvent
from tests.command_line import without_start
from tests.tiny_model import write_ids, write_tiny_model

PROGRAM = f"{sys.executable} -m cortiq_fcd"
LONG = "a" * 500


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("cortiq-fcd", PROGRAM)
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "in.cmf")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["config", "inspect IN", "inspect IN --json", "verify IN", "--help", "--version"])
@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
def test_a_result_that_cannot_be_written(command: str, where: str, model: Path) -> None:
    ran = shell(f"cortiq-fcd {command.replace('IN', str(model))} {where}")
    assert ran.returncode == 6, ran.stderr
    assert ran.stderr.startswith("error: the result can't be written to stdout (")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["config", "inspect IN", "--help"])
def test_nobody_reads(command: str, model: Path) -> None:
    ran = shell(f"cortiq-fcd {command.replace('IN', str(model))} | true; exit ${{PIPESTATUS[0]}}")
    assert (ran.returncode in (0, 141), ran.stderr) == (True, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_stderr_changes_no_code(where: str, model: Path) -> None:
    assert shell(f"cortiq-fcd verify {model} {where}").stdout == f"{model}: no faults\n"
    assert shell(f"cortiq-fcd verify no.cmf {where}").returncode == 2


@pytest.mark.parametrize("columns", ["0", "1", "10", "100000"])
def test_a_terminal_of_any_width_gets_the_whole_result(
    columns: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ids = write_ids(model.with_name("ids.npy"), 600)
    flags = ["--o1", "all", "--o1-m", "4", "--o1-window", "8", "--o1-sink", "1", "--seq", "64", "--windows", "1"]
    assert exits.run(["eval", str(model), "--text", str(ids), *flags]) == 0
    out = capsys.readouterr().out
    assert {"perplexity", "ratio", "tokens/s", "exact", "served"} <= set(out.split())
    assert len(out) < 10_000


def test_ascii(model: Path, tmp_path: Path) -> None:
    named = tmp_path / "ä.cmf"
    named.write_bytes(model.read_bytes())
    for command in (f"inspect {named}", f"verify {named}", "--help", f"report {named}"):
        ran = shell(f"cortiq-fcd {command}", PYTHONIOENCODING="ascii", LC_ALL="C")
        assert "Traceback" not in ran.stderr, ran.stderr
        assert ran.returncode == (2 if "report" in command else 0)
    ran = shell(f"cortiq-fcd inspect {named} --json", PYTHONIOENCODING="ascii")
    assert json.loads(ran.stdout)["path"] == str(named)
    assert 'train = "\\U000000e4"' in shell("cortiq-fcd config --corpus ä", PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize(
    "arguments",
    [["polish", "IN", out] for out in ("", ".", "..", LONG, "a/" * 3000)]
    + [[command, name] for command in ("inspect", "verify", "report", "demo") for name in (LONG, "a\udcff")]
    + [["polish", LONG, "o"], ["export", LONG, "d"], ["export", "IN", LONG], ["convert", LONG, "o"],
       ["convert", ".", LONG], ["convert", ".", ""], ["schema", LONG], ["config", "--config", LONG]]
    + [["polish", "IN", "o", flag, LONG] for flag in ("--corpus", "--val-corpus", "--teacher", "--report")]
    + [["polish", "IN", "o", "--threads", n] for n in ("2147483648", "3000000000", "100000")]
    + [["polish", "IN", "o", *pair] for pair in (("--lr", "1e38"), ("--steps", "9" * 30), ("--prefill", "9999"))],
    ids=lambda a: " ".join(part[:12] for part in a).encode("unicode_escape").decode(),
)  # fmt: skip
def test_hostile_arguments(
    arguments: list[str], model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    code = exits.run([str(model) if argument == "IN" else argument for argument in arguments])
    err = without_start(capsys.readouterr().err)
    assert (code, err.startswith("error: "), "hint: " in err) == (2, True, True), err
    if "--corpus" in arguments:
        assert err.startswith("error: --corpus ")


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nsteps = " + "9" * 5000,
        "[train]\nsteps = 0x" + "f" * 5000,
        "[o1]\nlayers = " + "[" * 5000 + "]" * 5000,
        "train.steps." + ".".join("a" * 5000) + " = 1",
        '[corpus]\ntrain = "a\\u0000b"',
        '[o1]\n"\\u001b[31m" = 3',
        "#" * 2_000_000,
    ],
    ids=["digits", "hex", "arrays", "keys", "zero", "escape", "size"],
)
def test_hostile_toml(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert exits.run(["config", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "hint: " in err
    assert len(err) < 1000
    assert "\x1b" not in err


def test_pipes_and_devices_are_not_read(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, beside = model.parent / "pipe", model.with_name("in.cmf.report.json")
    os.mkfifo(pipe)
    for target in (str(pipe), "/dev/zero"):
        assert exits.run(["config", "--config", target]) == 2
        assert exits.run(["inspect", target]) == 2
        beside.symlink_to(target)
        assert exits.run(["report", str(model)]) == 2
        assert "not a regular file" in capsys.readouterr().err
        beside.unlink()
    with beside.open("wb") as file:
        file.truncate(2**30)
    assert exits.run(["report", str(model)]) == 2
    assert "is not a readable report" in capsys.readouterr().err


def test_a_file_where_checkpoints_go(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.with_name("o.partial").touch()
    assert exits.run(["polish", str(model), str(model.with_name("o"))]) == 2
    assert "hint: " in capsys.readouterr().err


@pytest.mark.parametrize("error", [
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread")], ids=repr)  # fmt: skip
def test_out_of_memory(
    error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cortiq_fcd.io import verify

    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr(verify, "verify_model", fail)
    assert exits.run(["verify", str(model)]) == 6
    assert "hint: " in capsys.readouterr().err


def test_escapes_from_data_are_shown_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "a\x1b[31m\r\nb\x9b\x7f"
    model = write_tiny_model(tmp_path / nasty, arch={nasty: nasty})
    for command in (["inspect"], ["inspect", "--json"], ["verify"], ["report"], ["export"]):
        exits.run([command[0], str(model), *command[1:], *([str(tmp_path / "x")] if command == ["export"] else [])])
    exits.run(["verify", nasty])
    for kind in (Plain(sys.stdout), Warnings(sys.stdout)):
        kind(WarningEvent(message=nasty))
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err) & set("\x1b\r\x9b\x7f")
    assert json.loads(printable_json(json.dumps(nasty, ensure_ascii=False))) == nasty


def test_threads_sleep_while_they_wait_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And spin on an idle one, where it is faster; what the user chose stays."""
    half = (os.cpu_count() or 1) / 2
    for load, before, after in (
        (half * 0.9, None, None),
        (half * 1.1, None, "PASSIVE"),
        (half * 9, "ACTIVE", "ACTIVE"),
    ):
        monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
        if before is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert exits.run(["schema", "config"]) == 0
        assert os.environ.get("OMP_WAIT_POLICY") == after
