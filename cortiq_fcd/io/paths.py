"""What can be told about paths without opening them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def printable(path: str | os.PathLike[str]) -> str:
    r"""The path, or a text with paths in it, as UTF-8 can hold it: bytes that are none become \xNN."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def is_regular(path: Path, *, follow_links: bool = False) -> bool:
    """Whether a regular file is there: opening anything else may wait for ever, or read without an end."""
    try:
        return stat.S_ISREG(path.stat(follow_symlinks=follow_links).st_mode)
    except (OSError, ValueError):
        return False


def is_inside(path: Path, folder: Path) -> bool:
    """Whether the path is the folder or in it, behind all links; neither has to exist."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
