"""SIGINT and SIGTERM at every moment: never lost, never a traceback, nothing half-written left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cortiq_fcd.cli import exits, signals
from cortiq_fcd.stages.interrupt import Interrupted, Interruption

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "cortiq_fcd" / "data" / "demo.cmf"
# A console script as pip writes it, but for the byte that says that Python itself has started.
LAUNCHER = "import os, re, sys\nfrom cortiq_fcd.cli import {0}\nos.write(1, b'.')\nsys.exit({0}())\n"
# A module that catches everything while it loads, as numpy and torch do, and a command that imports it as it writes.
SLOW = """
import time
try:
    print("importing", flush=True)
    for _ in range({rounds}):
        time.sleep(0.01)
except BaseException:
    raise ImportError("a broken installation")
"""
COMMAND = """
import sys, time
from cortiq_fcd.cli import commands, exits, signals
from cortiq_fcd.stages.interrupt import Interruption
def check_source(file):
    with {block}:
        import slow
        time.sleep(60)
commands.check_source = check_source
sys.exit(exits.run(["verify", "in.cmf"]))
"""
BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
BLOCKS = pytest.mark.parametrize("block", ["signals.raised()", "Interruption().handling()"])


def start(*command: object, path: Path = ROOT) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def importing(folder: Path, rounds: int, block: str) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW.format(rounds=rounds))
    process = start("-c", COMMAND.format(block=block), path=folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


@BLOCKS
@BOTH
def test_a_signal_inside_an_import_is_answered_behind_it(
    block: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = importing(tmp_path, 30, block)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.splitlines()[0][:18], "Traceback" in err) == (code, "error: interrupted", False)


@BOTH
def test_a_second_one_ends_it_at_once(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = importing(tmp_path, 5000, "signals.raised()")
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    for _ in range(20):
        process.send_signal(number)
        time.sleep(0.05)
        if process.poll() is not None:
            break
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (code, "error: interrupted\n")


@pytest.mark.parametrize("name", ["main", "cortiq"])
def test_signals_at_any_moment_of_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(LAUNCHER.format(name))
    hf, out = tmp_path / "hf", tmp_path / "o.cmf"
    assert exits.run(["export", str(DEMO), str(hf)]) == 0
    polish = ["polish", DEMO] if name == "main" else ["convert", hf]
    options = [out, "--threads", "1", *(["--polish"] if name == "cortiq" else [])]
    for moment in range(28):
        number = signal.SIGTERM if moment % 4 == 3 else signal.SIGINT
        process = start(tmp_path / "script", *polish, *options)
        assert process.stdout is not None
        assert process.stdout.read(1) == "."
        time.sleep(0.0005 * 1.33**moment)  # up to 1.1 s: while the libraries load, and behind that
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number or "in _lead" not in err, (moment, err)
        assert "Traceback" not in err or "in _lead" not in err, (moment, err)
        assert [path.name for path in tmp_path.iterdir() if "o.cmf" in path.name] == [], moment


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals.raised():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(signals.Terminated), signals.raised():
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_answer_that_got_lost_is_given_before_training() -> None:
    with Interruption().handling() as interruption:
        with contextlib.suppress(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), interruption.patience():
            pytest.fail("training began")


def test_the_current_directory_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = (
        f"cd {tmp_path / 'gone'} && rmdir ../gone && exec {sys.executable} -m cortiq_fcd polish {DEMO} {tmp_path}/o"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: the current directory was deleted\nhint: cd to one that is there\n",
    )
