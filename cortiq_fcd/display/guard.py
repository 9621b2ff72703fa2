"""A display is a convenience: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from cortiq_fcd.display.figures import printable
from cortiq_fcd.events import Event


class Display(Protocol):
    """A listener that is opened before a run and closed after it."""

    def __call__(self, event: Event) -> None:
        """Show one event."""

    def open(self) -> None:
        """Take the terminal."""

    def close(self) -> None:
        """Give the terminal back."""


class Guarded:
    """Runs a display and drops it at its first exception, with one line that says so."""

    def __init__(self, display: Display, stream: TextIO, show_stopping: Callable[[], None] | None = None) -> None:
        """`show_stopping`: how the display tells that the run will stop; null if it redraws nothing."""
        self._display: Display | None = display
        self._stream = stream
        self._show_stopping = show_stopping

    def __call__(self, event: Event) -> None:
        """Show one event; never raises."""
        display = self._display
        if display is None:
            return
        try:
            display(event)
        except Exception as error:
            self._drop(display, error)

    def __enter__(self) -> Guarded:
        """Open the display."""
        display = self._display
        if display is not None:
            try:
                display.open()
            except Exception as error:
                self._drop(display, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the display."""
        if self._display is not None:
            _quietly_close(self._display)

    def stopping(self) -> bool:
        """Show that the run was asked to stop; false if this display can't. May be called inside a signal handler."""
        if self._display is None or self._show_stopping is None:
            return False
        self._show_stopping()
        return True

    def _drop(self, display: Display, error: Exception) -> None:
        self._display = None
        _quietly_close(display)
        try:
            why = printable(f"{type(error).__name__}: {error}")
            self._stream.write(f"note: the progress display stopped ({why}); the run goes on\n")
            self._stream.flush()
        except Exception:
            return


def _quietly_close(display: Display) -> None:
    try:
        display.close()
    except Exception:
        return
