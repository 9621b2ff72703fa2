"""A signal handler that never answers inside an import.

Modules such as numpy and torch catch what is raised while they load: the signal would be lost, or be shown as a broken
installation. Inside an import, at the start or in the middle of a run (torch imports much of itself when it is first
needed), it is put off until the import is over; a second one ends the process at once.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

AGAIN_S = 0.02


class OutsideImports:
    """A handler for `signal.signal`: calls `answer` with the signal's number, which may raise."""

    def __init__(self, answer: Callable[[int], object]) -> None:
        self._answer = answer
        self._is_put_off = False
        self._is_repeated = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Answer, or put off."""
        is_repeated, self._is_repeated = self._is_repeated, False
        if not _is_importing(frame):
            self._is_put_off = False
            self._answer(number)
            return
        if self._is_put_off and not is_repeated:
            with contextlib.suppress(OSError):
                # A live display hides the cursor, and nothing else will bring it back.
                os.write(2, (b"\x1b[?25h\n" if os.isatty(2) else b"") + b"error: interrupted\n")
            os._exit(128 + number)
        self._is_put_off = True
        timer = threading.Timer(AGAIN_S, self._repeat, (number,))
        timer.daemon = True
        timer.start()

    def _repeat(self, number: int) -> None:
        self._is_repeated = True
        main = threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:
            signal.pthread_kill(main, number)  # ends a sleep or a read, too
        else:
            _thread.interrupt_main(signal.Signals(number))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
