"""A command line run in this process, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.cli import exits


@dataclass(frozen=True)
class Ran:
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line."""

    def call(*arguments: object) -> Ran:
        code = exits.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, without_start(captured.err))

    return call


def without_start(err: str) -> str:
    """stderr without the lines that plain progress begins with, whatever comes of the command."""
    return re.sub(r"(?m)^ *\d+\.\d s  (starting|prepare)\b.*\n", "", err)


def leftovers(folder: Path) -> list[str]:
    """Names of temporary and intermediate files."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".") or "converted" in path.name)
