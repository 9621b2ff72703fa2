"""The whole program on a terminal: what is seen at once, after Ctrl-C, and of the command that goes on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.display.terminal import Session, start
from tests.tiny_model import write_ids, write_tiny_model

FLAGS = ["--o1-m", "4", "--o1-window", "2", "--o1-sink", "0", "--seq", "32", "--threads", "1", "--eval-every", "0"]


def polish(tmp_path: Path, columns: int, *more: str, piped: bool = False) -> Session:
    model = write_tiny_model(tmp_path / "in.cmf")
    texts = ["--corpus", str(write_ids(tmp_path / "train.npy", 2000)), "--val-corpus"]
    texts.append(str(write_ids(tmp_path / "val.npy", 400, seed=1)))
    arguments = ["-m", "cortiq_fcd", "polish", str(model), str(tmp_path / "out.cmf"), *FLAGS, *texts, *more]
    return start(arguments, columns, piped=piped)


@pytest.mark.parametrize("columns", [80, 200])
def test_ctrl_c_leaves_one_block_and_a_command_to_paste(tmp_path: Path, columns: int) -> None:
    session = polish(tmp_path, columns, "--steps", "1000000", "--progress", "auto")
    session.until(lambda screen: screen.count("step ") > 0)
    assert any("starting" in line for lines in session.seen for line in lines), "something is shown at once"
    session.press(b"\x03")
    assert session.end() == 130
    screen = session.screen
    for words in ("✓ dequantize", "✓ replica", "✓ evaluate", "polish  ", "gradient", "memory", "error: interrupted"):
        assert screen.count(words) == 1, "\n".join(screen.lines)
    at = next(i for i, line in enumerate(screen.lines) if line.startswith("hint: to go on:"))
    command = screen.lines[at + 1 :]
    assert all(len(line) <= columns for line in command)
    assert all(line.endswith(" \\") for line in command[:-1]), "a shell joins them again"
    words = shlex.split("\n".join(command).replace("\\\n", ""))
    assert words[:2] == ["cortiq-fcd", "polish"]
    assert words[-3:] == ["--progress", "auto", "--resume"]
    assert str(tmp_path / "val.npy") in words


def test_json_on_stdout_beside_a_live_display(tmp_path: Path) -> None:
    session = polish(tmp_path, 80, "--steps", "2", "--json", piped=True)
    assert session.process.stdout is not None
    with session.process.stdout as stdout:
        document = stdout.read()
    assert session.end() == 0
    assert json.loads(document)["steps_run"] == 2
    assert b"\x1b" not in document
    assert re.search(rb"\x1b\[", session.written), "stderr is a terminal"
