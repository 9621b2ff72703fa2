"""Command lines that are shown to be pasted: a terminal must not break them where a shell would not join them again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cortiq_fcd.display.figures import printable

CONTINUED = " \\"


def program() -> str:
    """How this program was called, if that can be pasted into a shell."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "cortiq-fcd" and shutil.which("cortiq-fcd") is None else "cortiq-fcd"


def columns_of(descriptor: int) -> int | None:
    """Width of the terminal behind a descriptor; null where there is none."""
    try:
        return os.get_terminal_size(descriptor).columns or None
    except OSError:
        return None


def command_lines(words: Sequence[str], columns: int | None, indent: str) -> list[str]:
    """One command in lines of at most `columns` (null: one line), each but the last ended by a backslash.

    Words stay whole, however long they are.
    """
    quoted = [printable(shlex.quote(word)) for word in words]
    lines = [indent + quoted[0]]
    for word in quoted[1:]:
        if columns is None or len(f"{lines[-1]} {word}{CONTINUED}") <= columns:
            lines[-1] += f" {word}"
        else:
            lines[-1] += CONTINUED
            lines.append(f"{indent}  {word}")
    return lines
