"""Paths of the command line, checked before anything is imported for them."""

from __future__ import annotations

import os
from pathlib import Path

from cortiq_fcd.errors import ConfigError

MOST_NAME_BYTES = 255  # of one path component, on all common file systems
MOST_PATH_BYTES = 4095


def check_source(file: Path) -> None:
    """ConfigError unless this is a regular file."""
    check_name(file, str(file))
    if not file.exists():
        raise ConfigError(f"{file}: there is no such file", hint="check the path")
    if file.is_dir():
        if (file / "config.json").is_file():
            hint = f"convert it first: cortiq-fcd convert {file} model.cmf"
            raise ConfigError(f"{file} is a HuggingFace model's folder; a CMF file is expected", hint=hint)
        raise ConfigError(f"{file} is a folder; a CMF file is expected", hint="name a file in it")
    if not file.is_file():
        raise ConfigError(f"{file}: is not a regular file", hint="copy what it holds into a file first")


def check_target(out: Path) -> None:
    """ConfigError for an OUT that names no file; whether it can be written is found out later."""
    check_name(out, str(out))
    if out.name in ("", "..") or out.is_dir():
        raise ConfigError(f"OUT is a folder ({out})", hint="name a file, such as model.cmf")
    partial = out.with_name(out.name + ".partial")
    if partial.is_file():
        raise ConfigError(f"{partial}: is a file, and checkpoints go into a folder of this name", hint="move it away")


def check_name(path: Path, where: str) -> None:
    """ConfigError for a path that no file system takes. `where`: how the user would call it."""
    if "\0" in str(path):
        raise ConfigError(f"{where}: a path can't hold a zero byte", hint="check the path")
    if len(os.fsencode(path)) > MOST_PATH_BYTES or any(len(os.fsencode(part)) > MOST_NAME_BYTES for part in path.parts):
        raise ConfigError(f"{where}: the name is too long", hint="name a shorter path")
