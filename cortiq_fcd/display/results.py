"""Where results are printed: stdout, as wide as the terminal, within reason."""

from __future__ import annotations

import sys

from rich.console import Console

# Narrower, tables lose whole columns, and with COLUMNS=0 there is no output at all: lines that wrap lose nothing.
LEAST_COLUMNS, MOST_COLUMNS = 72, 500


def result_console() -> Console:
    """A console on stdout that drops nothing."""
    console = Console(file=sys.stdout, highlight=False)
    console.width = min(max(console.width, LEAST_COLUMNS), MOST_COLUMNS)
    return console
