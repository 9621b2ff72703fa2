"""Signals of a command line: they end it with an exception, but never inside an import.

Modules such as numpy and torch catch what is raised while they load: the signal would be lost, or be shown as a broken
installation. Inside an import it is therefore put off until the import is over; a second one ends the process at once.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
AGAIN_S = 0.02
MESSAGE = "error: interrupted\nhint: the input file is never changed, and an output file appears only whole\n"


class Terminated(BaseException):
    """SIGTERM arrived."""


class _Handler:
    """Raises, or puts off what arrives inside an import."""

    def __init__(self) -> None:
        self._is_put_off = False
        self._is_repeated = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_repeated, self._is_repeated = self._is_repeated, False
        if not _is_importing(frame):
            self._is_put_off = False
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self._is_put_off and not is_repeated:
            with contextlib.suppress(OSError):
                os.write(2, MESSAGE.encode())
            os._exit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)
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


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Answer SIGINT and SIGTERM inside the block, unless they are ignored (nohup) or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
