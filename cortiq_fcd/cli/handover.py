"""The console script `cortiq`: it knows `convert` alone. Another `cortiq` on PATH gets every other sub-command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from cortiq_fcd.errors import ConfigError

_PASSED_ON = "CORTIQ_PASSED_ON"  # environment variable: the programs that a sub-command was handed through


def run(arguments: Sequence[str]) -> int:
    """Run `convert` and return its exit code, or become the other program."""
    arguments = list(arguments)
    if arguments and arguments[0] in ("--help", "-h"):
        arguments = ["convert", "--help"]
    if arguments[:1] == ["--version"] or arguments[:1] == ["convert"]:
        from cortiq_fcd.cli.exits import run

        return run(arguments)
    try:
        _pass_on(arguments)
    except ConfigError as error:
        from cortiq_fcd.cli.exits import say

        return say(error)


def _pass_on(arguments: Sequence[str]) -> NoReturn:
    """Become another `cortiq` with this sub-command; ConfigError when there is no other."""
    if not arguments:
        raise ConfigError("no command was given", hint="cortiq convert MODEL_DIR OUT; see cortiq convert --help")
    visited = [*filter(None, os.environ.get(_PASSED_ON, "").split(os.pathsep)), os.path.realpath(sys.argv[0])]
    other = next((path for path in _programs("cortiq") if not _is_visited(path, visited)), None)
    if other is None:
        raise ConfigError(
            f"there is no command {arguments[0]!r} here, and no other cortiq on PATH that could have it",
            hint="cortiq convert is the one command of this program; the others are those of cortiq-fcd",
        )
    environment = {**os.environ, _PASSED_ON: os.pathsep.join([*visited, os.path.realpath(other)])}
    if os.name != "nt":
        os.execve(other, [str(other), *arguments], environment)
    import subprocess

    sys.exit(subprocess.call([str(other), *arguments], env=environment))


def _programs(name: str) -> Iterator[Path]:
    """Executable files of this name on PATH, in its order."""
    endings = os.environ.get("PATHEXT", "").split(os.pathsep) if os.name == "nt" else [""]
    for folder in os.get_exec_path():
        for ending in endings:
            path = Path(folder or os.curdir) / f"{name}{ending}"
            if path.is_file() and os.access(path, os.X_OK):
                yield path


def _is_visited(path: Path, visited: Sequence[str]) -> bool:
    """Whether the program is this one, by any link or as installed elsewhere, or one that handed the command to us."""
    real = os.path.realpath(path)
    if real in visited:
        return True
    try:
        with Path(real).open("rb") as file:
            return b"cortiq_fcd.cli" in file.read(1 << 16)
    except OSError:
        return True
