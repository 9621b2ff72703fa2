"""Runs the command line and turns how it ended into a message on stderr and an exit code.

0 done; 1 a bug, with a traceback; 2 to 10 an expected error (`cortiq_fcd.errors`); 130 and 143 interrupted.
"""

from __future__ import annotations

import errno
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import typer

from cortiq_fcd.errors import ConfigError, CortiqError, ResourceError
from cortiq_fcd.stages.interrupt import Interrupted

# typer's own click may be a private copy: its base classes are reached through a class that typer exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}

INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM arrived."""


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. A bug is the only exception that leaves."""
    from cortiq_fcd.cli.commands import app

    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        command = typer.main.get_command(app)
        result = command.main(args=list(arguments), prog_name="cortiq-fcd", standalone_mode=False)
    except CortiqError as error:
        return say(error)
    except _UsageError as error:
        return _usage(error, arguments)
    except Interrupted as stopped:
        return _interrupted(stopped, arguments)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Terminated:
        result = TERMINATED
    except (OSError, MemoryError, RuntimeError) as error:
        expected = _as_expected(error)
        if expected is None:
            raise
        return say(expected)
    code = result if isinstance(result, int) else 0
    if code in (INTERRUPTED, TERMINATED):
        sys.stderr.write(
            "error: interrupted\nhint: the input file is never changed, and an output file appears only whole\n"
        )
    return code


def program() -> str:
    """How this program was called, if that can be pasted into a shell."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "cortiq-fcd" and shutil.which("cortiq-fcd") is None else "cortiq-fcd"


def _interrupted(stopped: Interrupted, arguments: Sequence[str]) -> int:
    """Say what was kept and how to go on; the exit code."""
    saved = (
        "nothing was saved yet" if stopped.saved_step is None else f"the state after step {stopped.saved_step} is saved"
    )
    sys.stderr.write(f"error: interrupted; {saved}\n")
    if stopped.saved_step is None:
        sys.stderr.write("hint: the input file is never changed, and an output file appears only whole\n")
    else:
        again = [argument for argument in arguments if argument not in ("--restart", "--resume")]
        resume = ["--resume"] if arguments[0] == "polish" else []
        sys.stderr.write(f"hint: to go on: {shlex.join([program(), *again, *resume])}\n")
    return TERMINATED if stopped.signal == signal.SIGTERM else INTERRUPTED


def say(error: CortiqError) -> int:
    """Print an expected error as every command does, and return its exit code."""
    sys.stderr.write(f"error: {error.message}\n")
    for line in error.hint.splitlines():
        sys.stderr.write(f"hint: {line}\n")
    return error.exit_code


def _usage(error: Exception, arguments: Sequence[str]) -> int:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message:  # no command at all: the help was printed instead
        return ConfigError.exit_code
    known = arguments[0] if arguments and not arguments[0].startswith("-") and "No such command" not in message else ""
    return say(ConfigError(message.rstrip("."), hint=f"see cortiq-fcd {known + ' ' if known else ''}--help"))


def _as_expected(error: Exception) -> CortiqError | None:
    """Errors of the machine and of paths that are the user's to solve; None for everything else."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError(
            f"out of memory ({error})" if str(error) else "out of memory", hint="try a smaller --batch or --seq"
        )
    if not isinstance(error, OSError) or error.filename is None:
        return None
    where = f"{error.filename}: {error.strerror}"
    if error.errno in _FULL_DISK:
        return ResourceError(where, hint="free some space, or write somewhere else")
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)):
        return ConfigError(where)
    return None


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Terminated
