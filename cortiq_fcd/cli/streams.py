"""stdout and stderr that can be closed, full, a broken pipe, or of an encoding that lacks characters: no traceback.

stdout carries results, so one that can't be written is an error. stderr only tells: nothing depends on it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from cortiq_fcd.errors import ResourceError

BROKEN_PIPE = 141  # what a shell shows for a program that SIGPIPE ended


class PipeClosedError(Exception):
    """Who read stdout has gone: there is nobody to tell."""


class _Stream:
    """A text stream, but for what happens when it can't be written."""

    def __init__(self, stream: TextIO | None, *, is_needed: bool) -> None:
        self._stream: TextIO = io.StringIO() if stream is None else stream
        self._is_needed = is_needed
        self._is_closed = stream is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self._is_closed and self._stream.isatty()

    def write(self, text: str) -> int:
        if self._is_closed:
            if self._is_needed and text:
                raise _gone("it is closed")
            return len(text)
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        if self._is_closed:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Let what is still buffered, and all that follows, go nowhere: Python flushes once more at its end."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if not self._is_needed:
            return
        if isinstance(error, BrokenPipeError):
            raise PipeClosedError from error
        raise _gone(error.strerror or str(error)) from error


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Put the guards before sys.stdout and sys.stderr for the length of the block."""
    before = sys.stdout, sys.stderr
    _occupy_closed_descriptors()
    for stream in before:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    sys.stdout = cast("TextIO", _Stream(before[0], is_needed=True))
    sys.stderr = cast("TextIO", _Stream(before[1], is_needed=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _occupy_closed_descriptors() -> None:
    """Else the next file opened would become stdout or stderr, and get whatever a library prints there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one


def _gone(why: str) -> ResourceError:
    return ResourceError(
        f"the result can't be written to stdout ({why})",
        hint="files that the command was asked to write are in place: only what it prints is lost",
    )


def write_text(text: str) -> None:
    """Print lines on stdout; control characters in them, which come from data, are escaped."""
    from cortiq_fcd.display.figures import printable_lines

    sys.stdout.write(printable_lines(text))


def write_json(text: str) -> None:
    """Print JSON on stdout; what a terminal would obey or the encoding lacks is written as JSON escapes."""
    from cortiq_fcd.display.figures import printable_json

    sys.stdout.write(printable_json(text, sys.stdout.encoding))
