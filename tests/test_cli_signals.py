"""SIGINT and SIGTERM that arrive while modules are imported: neither lost nor a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cortiq_fcd.cli import signals

# A module that catches everything while it loads, as numpy and torch do, and a command that imports it.
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
from cortiq_fcd.cli import commands, exits
def check_source(file):
    import slow
    time.sleep(60)
commands.check_source = check_source
sys.exit(exits.run(["verify", "in.cmf"]))
"""
BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


def importing(folder: Path, rounds: int) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW.format(rounds=rounds))
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root])}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


@BOTH
def test_a_signal_inside_an_import_is_answered_behind_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = importing(tmp_path, 30)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, signals.MESSAGE)


@BOTH
def test_a_second_one_ends_it_at_once(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = importing(tmp_path, 5000)
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    for _ in range(20):
        process.send_signal(number)
        time.sleep(0.05)
        if process.poll() is not None:
            break
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (code, signals.MESSAGE)


@BOTH
def test_signals_at_any_moment_of_the_start(number: signal.Signals, code: int, tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "cortiq_fcd" / "data" / "demo.cmf"
    command = [sys.executable, "-m", "cortiq_fcd", "polish", str(model), str(tmp_path / "o.cmf"), "--threads", "1"]
    for delay_s in (0.1, 0.3, 0.6, 1.0):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        time.sleep(delay_s)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        # Before Python runs a line of ours the system's own answer is the right one.
        early = process.returncode == -number or (number == signal.SIGINT and "cortiq_fcd/cli" not in err)
        assert process.returncode == code or early, (delay_s, err)
        assert "Traceback" not in err or early, (delay_s, err)
        assert list(tmp_path.glob("*.cmf")) == []


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals.handled():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(signals.Terminated), signals.handled():
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
