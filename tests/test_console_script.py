"""The console script `cortiq`, and what it hands on; the example for other converters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cortiq_fcd import cli
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[1]


LAUNCHER = f"#!{sys.executable}\nimport sys\nfrom cortiq_fcd.cli import cortiq\nsys.exit(cortiq())\n"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def call(program: Path, *arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(ROOT)}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_other_commands_go_to_another_cortiq(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "c" / "cortiq", '#!/bin/sh\necho "other $@"\nexit 7\n')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cortiq").symlink_to(ours)
    ran = call(ours, "run", "x y", "--json", path=[tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "other run x y --json\n", "")


def test_never_to_itself(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "elsewhere" / "cortiq", LAUNCHER)  # the same package in another environment
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cortiq").symlink_to(ours)
    os.link(ours, tmp_path / "b" / "hard")
    path = [tmp_path / "a", tmp_path / "b", tmp_path / "elsewhere", tmp_path / "nowhere"]
    ran = call(tmp_path / "b" / "cortiq", "run", path=path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no other cortiq on PATH" in ran.stderr


def test_a_wrapper_around_us_does_not_turn_in_circles(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "w" / "cortiq", f'#!/bin/sh\nexec {ours} "$@"\n')
    ran = call(tmp_path / "w" / "cortiq", "run", path=[tmp_path / "w", Path("/bin"), Path("/usr/bin")])
    assert ran.returncode == 2
    assert "no other cortiq on PATH" in ran.stderr


def test_help_and_no_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for arguments, code, word in ((["--help"], 0, "--keep-intermediate"), (["convert", "--help"], 0, "--o1-window")):
        monkeypatch.setattr(sys, "argv", ["cortiq", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.cortiq()
        assert ended.value.code == code
        assert word in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cortiq"])
    with pytest.raises(SystemExit) as ended:
        cli.cortiq()
    assert ended.value.code == 2
    assert "no command" in capsys.readouterr().err


def test_the_example_for_other_converters(tmp_path: Path, ids: list[str]) -> None:
    page = (ROOT / "docs" / "convert.md").read_text("utf-8")
    example = tmp_path / "example.py"
    example.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    model = write_tiny_model(tmp_path / "in.cmf", provenance={"o1_attn": {"layers": "all", "m": 4, "w": 2, "sink": 0}})
    launcher = f"#!{sys.executable}\nimport sys\nfrom cortiq_fcd.cli import main\nsys.exit(main())\n"
    script(tmp_path / "bin" / "cortiq-fcd", launcher)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out.cmf"
    options = [*ids, "--seq", "32", "--steps", "2", "--batch", "1", "--threads", "1"]

    def example_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(example), str(model), str(out), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    ran = example_run(*options)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("step ")][-1].startswith("step 2 of 2, loss ")
    assert lines[-1].split()[0] in ("polished", "identity")
    assert out.exists()
    model.unlink()
    again = example_run(*options)
    assert again.returncode == 1
    assert "exit 2: error: " in again.stderr
