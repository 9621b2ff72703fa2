"""The command line: parse, configure, run, exit code. Heavy modules are imported inside the commands that need them.

Both console scripts start here, in a module that imports next to nothing. SIGINT and SIGTERM end the process at once:
until a command writes there is nothing to clean up, and an exception that a handler raises in the middle of an import
can be swallowed, or be shown as a broken installation. Commands that write answer them otherwise meanwhile
(`cortiq_fcd.cli.signals`, `cortiq_fcd.stages.interrupt`).
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing typing takes longer than everything else here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MESSAGE", "cortiq", "main"]

MESSAGE = "error: interrupted\nhint: the input file is never changed, and an output file appears only whole\n"


def main() -> None:
    """The console script `cortiq-fcd`."""

    def run(arguments: Sequence[str]) -> int:
        from cortiq_fcd.cli.exits import run

        return run(arguments)

    _lead(run)


def cortiq() -> None:
    """The console script `cortiq`."""

    def run(arguments: Sequence[str]) -> int:
        from cortiq_fcd.cli.handover import run

        return run(arguments)

    _lead(run)


def _lead(program: Callable[[Sequence[str]], int]) -> None:
    try:
        answer_signals(end_at_once)
    except KeyboardInterrupt:  # Python's own answer, until ours is in its place
        os._exit(128 + signal.SIGINT)
    code = program(sys.argv[1:])
    answer_signals(signal.SIG_DFL)  # while the interpreter closes
    if "WORLD_SIZE" in os.environ:
        _leave_others(code)
    sys.exit(code)


def _leave_others(code: int) -> None:
    """Exit at once, if this is one of several processes: threads that hold connections to the others would abort a
    process that closes itself in order.
    """
    import contextlib

    from cortiq_fcd.stages.launch import place

    if place() is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def answer_signals(answer: Callable[[int, object], object] | signal.Handlers) -> None:
    """Set the handler of SIGINT and SIGTERM, unless they are ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, answer)


def end_at_once(number: int, _: object) -> None:
    """A handler that ends the process, with the exit code that a shell would show."""
    try:
        os.write(2, MESSAGE.encode())
    except OSError:
        pass
    finally:
        os._exit(128 + number)
