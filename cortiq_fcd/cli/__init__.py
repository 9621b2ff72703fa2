"""The command line: parse, configure, run, exit code. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    from cortiq_fcd.cli import signals

    try:
        with signals.handled():  # before anything that takes time to import
            from cortiq_fcd.cli.exits import run

            code = run(sys.argv[1:])
    except (KeyboardInterrupt, signals.Terminated) as stopped:
        if sys.stderr is not None:
            sys.stderr.write(signals.MESSAGE)
        code = signals.TERMINATED if isinstance(stopped, signals.Terminated) else signals.INTERRUPTED
    _leave(code)


def _leave(code: int) -> None:
    """Exit. A signal that arrives while the interpreter closes ends it, without a traceback."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    sys.exit(code)
