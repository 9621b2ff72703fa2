"""Runs the command line and turns how it ended into a message on stderr and an exit code.

0 done; 1 a bug, with a traceback; 2 to 10 an expected error (`cortiq_fcd.errors`); 130 and 143 interrupted;
141 nobody reads stdout any more.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from cortiq_fcd.cli import MESSAGE
from cortiq_fcd.cli.signals import Terminated
from cortiq_fcd.cli.streams import BROKEN_PIPE, PipeClosedError, guarded
from cortiq_fcd.errors import ConfigError, CortiqError, LostRankError, RankEndedError, ResourceError
from cortiq_fcd.stages.interrupt import Interrupted
from cortiq_fcd.stages.launch import place

# typer's own click may be a private copy: its base classes are reached through a class that typer exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_OF_AN_OPTION = re.compile(r"\AInvalid value for '(?P<flag>--[a-z0-9-]+)'[^:]*:")
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_OF_THE_MACHINE = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
_PATH_HINTS = {
    errno.ENOENT: "check the path",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EISDIR: "name a file in that folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ELOOP: "a symbolic link there leads back to itself",
    errno.EACCES: "check its permissions",
}
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def _let_threads_wait() -> None:
    """Choose how OpenMP's threads wait for each other, before torch is imported, unless the user did.

    Threads that spin while they wait save a sixth of a step on an idle machine, but starve each other, to several times
    the time of a step, where something else runs: there they sleep.
    """
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > (os.cpu_count() or 1) / 2:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. A bug is the only exception that leaves."""
    _let_threads_wait()
    with guarded():
        try:
            code = _run(arguments)
            sys.stdout.flush()
        except LostRankError as error:
            code = say_lost(error)
        except CortiqError as error:
            code = say(error, _command_of(arguments))
        except RankEndedError as ended:
            code = ended.exit_code
        except Interrupted as stopped:
            code = _interrupted(stopped, arguments)
        except (KeyboardInterrupt, typer.Abort):
            code = _stopped(INTERRUPTED)
        except Terminated:
            code = _stopped(TERMINATED)
        except PipeClosedError:
            code = BROKEN_PIPE
        sys.stderr.flush()
    return code


def _run(arguments: Sequence[str]) -> int:
    from cortiq_fcd.cli.commands import app

    try:
        _check_encoding(arguments)
        _check_folder()
        command = typer.main.get_command(app)
        result = command.main(args=list(arguments), prog_name="cortiq-fcd", standalone_mode=False)
    except _UsageError as error:
        return _usage(error, arguments)
    except (OSError, MemoryError, RuntimeError) as error:
        expected = as_expected(error)
        if expected is None:
            raise
        return say(expected, _command_of(arguments))
    if result == INTERRUPTED:  # some versions of click answer Ctrl-C themselves
        return _stopped(INTERRUPTED)
    return result if isinstance(result, int) else 0


def _stopped(code: int) -> int:
    sys.stderr.write(MESSAGE)
    return code


def _check_encoding(arguments: Sequence[str]) -> None:
    """Reports are UTF-8, and name what they were made from."""
    for argument in arguments:
        if any("\ud800" <= char <= "\udfff" for char in argument):
            raise ConfigError(f"{argument}: is not valid UTF-8", hint="rename the file, or reach it by a link")


def _check_folder() -> None:
    """Where the current directory is gone no relative path means anything, and torch's library ends the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current directory was deleted", hint="cd to one that is there") from None


def _interrupted(stopped: Interrupted, arguments: Sequence[str]) -> int:
    """Say what was kept and how to go on; the exit code."""
    sys.stderr.write(f"error: interrupted; {_saved(stopped.saved_step)}\n")
    if stopped.saved_step is None:
        sys.stderr.write("hint: the input file is never changed, and an output file appears only whole\n")
    else:
        sys.stderr.write(f"hint: {_going_on(arguments)}\n")
    return TERMINATED if stopped.signal == signal.SIGTERM else INTERRUPTED


def say_lost(error: LostRankError) -> int:
    """Say that a process of the run is gone and how to go on; the exit code."""
    here = place()
    if here is not None and here.restarts_by_itself:
        how = "torchrun starts the run again, and it goes on from the last checkpoint"
    else:
        how = _going_on(sys.argv[1:]) if error.saved_step is not None else "give the same command again"
    code = say(LostRankError(f"{error.message}; {_saved(error.saved_step)}", hint=error.hint))
    sys.stderr.write(f"hint: {how}\n")
    return code


def _saved(step: int | None) -> str:
    return "nothing was saved yet" if step is None else f"the state after step {step} is saved"


def _going_on(arguments: Sequence[str]) -> str:
    """The command that does, to be pasted."""
    from cortiq_fcd.cli.pasting import columns_of, command_lines, program

    here = place()
    again = [argument for argument in arguments if argument not in ("--restart", "--resume")]
    resume = ["--resume"] if arguments[0] == "polish" else []
    columns = columns_of(2) if sys.stderr.isatty() else None
    words = [*(here.launcher if here else [program()]), *again, *resume]
    command = "\n".join(command_lines(words, columns, "" if columns is None else "  "))
    where = ", on every machine and with torchrun's other options as before" if here and here.is_spread else ""
    return f"to go on{where}:{' ' if columns is None else chr(10)}{command}"


def _command_of(arguments: Sequence[str]) -> str:
    return arguments[0] if arguments and not arguments[0].startswith("-") else ""


def say(error: CortiqError, command: str = "polish") -> int:
    """Print an expected error as every command does, and return its exit code. What came from data can't steer a
    terminal. `command`: the one that was run.
    """
    from cortiq_fcd.display.figures import printable

    about_options = f"cortiq-fcd {command} --help lists units and defaults"
    hint = error.hint or (about_options if error.message.startswith("--") else "")
    lines = [f"error: {error.message}", *(f"hint: {line}" for line in hint.split("\n") if line)]
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    return error.exit_code


def _usage(error: Exception, arguments: Sequence[str]) -> int:
    here = place()
    if here is not None and here.rank:
        return ConfigError.exit_code  # every rank was given the same
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message:  # no command at all: the help was printed instead
        return ConfigError.exit_code
    known = _command_of(arguments) if "No such command" not in message else ""
    message = _OF_AN_OPTION.sub(r"\g<flag>:", message)
    return say(ConfigError(message.rstrip("."), hint=f"see cortiq-fcd {known + ' ' if known else ''}--help"))


def as_expected(error: Exception) -> CortiqError | None:
    """Errors of the machine and of paths that are the user's to solve; None for everything else."""
    if _is_out_of_memory(error):
        text = "" if isinstance(error, RuntimeError) and "CUDA" not in str(error) else str(error)
        return ResourceError(
            f"out of memory ({text})" if text else "out of memory", hint="try a smaller --batch or --seq"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return ResourceError("no more threads can be started", hint="raise the limit (ulimit -u), or give --threads 1")
    if not isinstance(error, OSError) or error.filename is None:
        return None
    where = f"{os.fsdecode(error.filename)}: {error.strerror}"
    if error.errno in _FULL_DISK:
        return ResourceError(where, hint="free some space, or write somewhere else")
    if error.errno in _OF_THE_MACHINE:
        return ResourceError(where, hint="this is a limit or a fault of the machine, not of the file")
    return ConfigError(where, hint=_PATH_HINTS.get(error.errno or 0, "check the path and its permissions"))


def _is_out_of_memory(error: Exception) -> bool:
    """torch's allocator for the CPU has no exception of its own."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)
