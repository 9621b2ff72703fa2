"""Settings as TOML: what `--config` reads and `config` prints."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortiq_fcd.cli.paths import check_name
from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from cortiq_fcd.stages.config import PolishConfig

MOST_TOML_BYTES = 1_000_000


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file as a dictionary. Raises ConfigError."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    check_name(file, f"--config {file}")
    try:
        text = _small_text(file)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}", hint="give a file as `config` prints it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {file} is not valid TOML: {error}", hint="save it as UTF-8") from error
    try:
        table: dict[str, Any] = toml.loads(text)
    except ValueError as error:  # TOMLDecodeError, and int() of thousands of digits
        raise ConfigError(f"--config {file} is not valid TOML: {error}", hint="`config` prints a valid one") from error
    except RecursionError:
        raise ConfigError(f"--config {file} is nested too deeply", hint="`config` prints a valid one") from None
    return table


def _small_text(file: Path) -> str:
    """The text of a regular file; a pipe might never end, and a device never does."""
    if file.is_dir():
        raise ConfigError(f"--config {file} is a folder", hint="name a .toml file in it")
    if file.exists() and not file.is_file():
        raise ConfigError(f"--config {file}: is not a regular file", hint="save the settings in a file first")
    if file.stat().st_size > MOST_TOML_BYTES:
        raise ConfigError(
            f"--config {file}: {file.stat().st_size:,} bytes are too many for settings",
            hint=f"at most {MOST_TOML_BYTES:,} bytes",
        )
    return file.read_text(encoding="utf-8")


def to_toml(config: PolishConfig, encoding: str = "utf-8") -> str:
    """The configuration as TOML that `--config` reads back; what is not set is a comment. `encoding`: what it lacks is
    escaped.
    """
    lines = []
    for section, table in config:
        lines.append(f"[{section}]")
        for key, field in type(table).model_fields.items():
            value = getattr(table, key)
            lines.append(f"# {field.description}")
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml_value(value, encoding)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any, encoding: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    from cortiq_fcd.display.figures import is_plain

    text = json.dumps(str(value), ensure_ascii=False)
    return "".join(char if is_plain(char, encoding) else f"\\U{ord(char):08x}" for char in text)
