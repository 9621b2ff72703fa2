"""SIGINT and SIGTERM while a command writes files: exceptions, so that what is half-written is removed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from cortiq_fcd.stages.outside_imports import OutsideImports


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt or Terminated inside the block, unless the signals are ignored (nohup) or this is not the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = OutsideImports(_raise)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, old)


def _raise(number: int) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
