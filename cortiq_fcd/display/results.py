"""Where results are printed: stdout, as wide as the terminal, within reason."""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO, cast

from rich.console import Console

# Narrower, tables lose whole columns, and with COLUMNS=0 there is no output at all: lines that wrap lose nothing.
LEAST_COLUMNS, MOST_COLUMNS = 72, 500


class _WithoutTrailingBlanks:
    """A stream for rich, which fills the last column of a table with blanks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))
        return len(text)


def result_console() -> Console:
    """A console on stdout that drops nothing."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.file = cast("TextIO", _WithoutTrailingBlanks(sys.stdout))
    console.width = min(max(console.width, LEAST_COLUMNS), MOST_COLUMNS)
    return console
