"""What a terminal shows; stages know only `cortiq_fcd.events.Listener`."""

from __future__ import annotations

import os
from typing import Literal, TextIO, get_args

from cortiq_fcd.display.guard import Display, Guarded
from cortiq_fcd.display.jsonlines import JsonLines
from cortiq_fcd.display.plain import Plain, Warnings
from cortiq_fcd.events import Event

ProgressKind = Literal["auto", "rich", "plain", "json", "none"]
KINDS: tuple[str, ...] = get_args(ProgressKind)


class _Silent:
    """Says nothing at all."""

    def __call__(self, event: Event) -> None:
        """Ignore the event."""

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""


def silent_listener(stream: TextIO) -> Guarded:
    """A listener that says nothing, of a process beside which another one tells."""
    return Guarded(_Silent(), stream)


def make_listener(kind: ProgressKind, stream: TextIO, *, quiet: bool = False, verbose: bool = False) -> Guarded:
    """A context manager that is also an `events.Listener`.

    `auto` is rich on a terminal and plain lines otherwise; rich asked for without a terminal is plain too, since a live
    block would flood a log. `quiet` leaves warnings alone, `verbose` gives every step its own plain line.
    """
    if not quiet and kind in ("auto", "rich") and _is_live_terminal(stream):
        from rich.console import Console  # only a live terminal pays for importing rich

        from cortiq_fcd.display.live import LiveDisplay

        live = LiveDisplay(Console(file=stream))
        return Guarded(live, stream, live.show_stopping)
    return Guarded(_lines("none" if quiet else kind, stream, verbose), stream)


def _lines(kind: ProgressKind, stream: TextIO, verbose: bool) -> Display:
    if kind == "json":
        return JsonLines(stream)
    if kind == "none":
        return Warnings(stream)
    return Plain(stream, every_s=0.0 if verbose else 1.0)


def _is_live_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
