"""A terminal to run programs in: a pseudo-terminal of a given size, and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[2]
ROWS = 60
WIDE = 2000
PATIENCE_S = 120


class Screen:
    """What is seen, and what would be seen if no line could reach the edge."""

    def __init__(self, columns: int, rows: int = ROWS) -> None:
        self._real, self._wide = pyte.Screen(columns, rows), pyte.Screen(WIDE, rows)
        self._streams = [pyte.ByteStream(screen) for screen in (self._real, self._wide)]

    def feed(self, data: bytes) -> None:
        for stream in self._streams:
            stream.feed(data)

    @property
    def lines(self) -> list[str]:
        """Rows from the top, the empty ones at the end left out."""
        return "\n".join(line.rstrip() for line in self._real.display).rstrip("\n").split("\n")

    @property
    def has_wrapped(self) -> bool:
        """Whether a line ran over the edge."""
        return [line.rstrip() for line in self._real.display] != [line.rstrip() for line in self._wide.display]

    def count(self, words: str) -> int:
        """How many rows hold these words."""
        return sum(words in line for line in self.lines)


@dataclass
class Session:
    """A program that runs on a terminal (stdin and stderr; stdout too, unless `piped`)."""

    screen: Screen
    process: subprocess.Popen[bytes]
    _parent: int
    written: bytes = b""
    seen: list[list[str]] = field(default_factory=list)

    def until(self, ready: Callable[[Screen], bool]) -> None:
        """Read until the screen is as wanted, or fail."""
        limit_s = time.monotonic() + PATIENCE_S
        while not ready(self.screen):
            assert time.monotonic() < limit_s, "\n".join(self.screen.lines)
            assert self._read(), "\n".join(self.screen.lines)

    def press(self, keys: bytes) -> None:
        os.write(self._parent, keys)

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        os.close(self._parent)
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        readable, _, _ = select.select([self._parent], [], [], PATIENCE_S)
        try:
            chunk = os.read(self._parent, 65536) if readable else b""
        except OSError:  # Linux: the child closed its end
            chunk = b""
        self.written += chunk
        self.screen.feed(chunk)
        self.seen.append(self.screen.lines)
        return bool(chunk)


def start(arguments: Sequence[str], columns: int, rows: int = ROWS, piped: bool = False, **environment: str) -> Session:
    """Run `python ARGUMENTS` on a terminal of this size; Ctrl-C reaches it as it would on a real one."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=child,
        stdout=subprocess.PIPE if piped else child,
        stderr=child,
        cwd=ROOT,
        env=clean | {"TERM": "xterm-256color", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(child)
    return Session(Screen(columns, rows), process, parent)
