"""Signals as requests: the first one lets the step at hand end and be saved, the second one stops at once.

Outside the training loop there is nothing to save, and the first one stops at once too. Only a command line installs
this; a library call leaves signals alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from cortiq_fcd.stages.outside_imports import OutsideImports

_NOTICE = b"\nstopping: this step is finished and saved first; once more to stop at once\n"


class Interrupted(BaseException):
    """The run was asked to stop, and did. `saved_step`: where it can go on; null if nothing is saved."""

    def __init__(self, number: int, saved_step: int | None) -> None:
        super().__init__(f"signal {number}")
        self.signal = number
        self.saved_step = saved_step


class Interruption:
    """What signals have asked for. `requested` is the first signal's number, `saved_step` the newest saved state's."""

    def __init__(self, show: Callable[[], bool] | None = None) -> None:
        """`show`: tells the user that the run will stop, from inside a signal handler; false if it can't."""
        self._show = show
        self.requested: int | None = None
        self.saved_step: int | None = None
        self._stopped_by: int | None = None
        self._patient = False

    @contextlib.contextmanager
    def handling(self) -> Iterator[Interruption]:
        """Answer SIGINT and SIGTERM inside the block (in the main thread only: no other may)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        handler = OutsideImports(self._on_signal)
        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, old in before.items():
                if signal.getsignal(number) is handler:  # not after `hear_no_signals`
                    signal.signal(number, old)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Inside the block a first signal only sets `requested`; it is answered at the latest at the block's end."""
        if self._stopped_by is not None:  # what was raised got lost, as it does in a destructor
            raise Interrupted(self._stopped_by, self.saved_step)
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        if self.requested is not None:
            raise Interrupted(self.requested, self.saved_step)

    def _on_signal(self, number: int) -> None:
        if not self._patient or self.requested is not None:
            self._stopped_by = number
            raise Interrupted(number, self.saved_step)
        self.requested = number
        if self._show is not None and self._show():
            return
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)  # not through sys.stderr, which may be in the middle of a line


def hear_no_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on: a run of several processes is over, which makes torchrun send them, and
    what is left is to save and to tell.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
