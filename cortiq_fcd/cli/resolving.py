"""The configuration that options and a TOML file make together, and what is said of settings that can't be."""

from __future__ import annotations

import difflib
import re
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortiq_fcd.cli.paths import check_name
from cortiq_fcd.cli.settings import FLAG_OF, HELP_OF, Flags
from cortiq_fcd.cli.toml import read_toml
from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from cortiq_fcd.stages.config import PolishConfig

PATHS = ("corpus.train", "corpus.val", "train.teacher", "output.report", "output.log_jsonl", "output.tensorboard")
SIZES = ("compute.memory_budget",)
_SIZE = re.compile(r"(?P<number>\d{1,20}(\.\d{0,20})?) ?((?P<unit>[KMGT]?)(?P<binary>i?)B?)", re.ASCII | re.IGNORECASE)
MOST_COUNT = 2**31 - 1
MOST = {
    "corpus.max_train_bytes": 2**62,
    "corpus.max_val_bytes": 2**62,
    "compute.memory_budget": 2**62,
    "train.seed": 2**64 - 1,
    "train.lr": 1000.0,  # AdamW moves each weight by about this much: far beyond any use, far below overflow
}
_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 100
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "is_instance_of": "a path",
    "model_type": "a table of settings",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def resolve(flags: Flags, file: Path | None) -> PolishConfig:
    """The configuration that flags and a TOML file make together; flags win. Raises ConfigError."""
    from pydantic import ValidationError

    from cortiq_fcd.stages.config import PolishConfig

    merged = read_toml(file) if file is not None else {}
    for field, value in flags.items():
        section, key = field.split(".")
        table = merged.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} should be a table, got {_shown(table)}", hint=f"[{section}]")
        table[key] = value
    _check_paths(merged, flags, file)
    _read_sizes(merged, flags, file)
    try:
        config = PolishConfig.model_validate(merged)
    except ValidationError as error:
        raise _explained(error, flags, file) from error
    _check_ranges(config, flags, file)
    return config


def _check_paths(merged: dict[str, Any], flags: Flags, file: Path | None) -> None:
    """Replace texts by paths, which strict models want; ConfigError for those that no file system takes."""
    for field in PATHS:
        section, key = field.split(".")
        table = merged.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = Path(table[key])
            check_name(table[key], f"{_where(field, flags, file)} {table[key]}")


def _read_sizes(merged: dict[str, Any], flags: Flags, file: Path | None) -> None:
    """Replace texts such as 2.4G by bytes; ConfigError for what is no size."""
    for field in SIZES:
        section, key = field.split(".")
        table = merged.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _bytes_of(table[key], _where(field, flags, file))


def _bytes_of(text: str, where: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{where}: {_shown(text)} is not a size", hint="such as 2.4G, 800M, 1.5GiB, or bytes")
    power, binary = " KMGT".index(match["unit"].upper() or " "), match["binary"]
    nbytes: int = round(float(match["number"]) * (1024 if binary else 1000) ** power)
    if nbytes < 1:
        raise ConfigError(f"{where}: {_shown(text)} is no memory at all", hint="such as 2.4G, 800M, 1.5GiB, or bytes")
    return nbytes


def _check_ranges(config: PolishConfig, flags: Flags, file: Path | None) -> None:
    """What is valid, but larger than any run could use and than the libraries' numbers go."""
    for section, table in config:
        for key in type(table).model_fields:
            field, value = f"{section}.{key}", getattr(table, key)
            most = MOST.get(field, MOST_COUNT)
            if isinstance(value, (int, float)) and value > most:
                where = _where(field, flags, file)
                hint = f"{FLAG_OF[field]}: {HELP_OF[field]}" if field in FLAG_OF else ""
                raise ConfigError(f"{where}: expected at most {most}, got {_shown(value)}", hint=hint)


def _where(field: str, flags: Flags, file: Path | None) -> str:
    return FLAG_OF[field] if field in flags else f"{file}: {field}"


def _shown(value: Any) -> str:
    """A value in a message: short, and without the errors that huge numbers and deep tables meet."""
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):
        return f"a huge {type(value).__name__}"


def _explained(error: ValidationError, flags: Flags, file: Path | None) -> ConfigError:
    hints = []
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(map(str, item["loc"]))
        where = _where(field, flags, file)
        if item["type"] == "extra_forbidden":
            parts.append(f"{where} is no setting")
            close = difflib.get_close_matches(field, FLAG_OF, n=1)
            hints.append(f"did you mean {close[0]}?" if close else "`cortiq-fcd config` prints all settings")
        else:
            parts.append(
                f"{where}: expected {_expected(item['type'], item.get('ctx', {}), item['msg'])}, "
                f"got {_shown(item['input'])}"
            )
            hints += [f"{FLAG_OF[field]}: {HELP_OF[field]}"] if field in HELP_OF else []
    return ConfigError("; ".join(parts), hint="\n".join(hints) or "`cortiq-fcd config` prints all settings")


def _expected(kind: str, context: dict[str, Any], otherwise: str) -> str:
    """What a setting should have been."""
    if kind == "literal_error":
        return str(context["expected"])
    bound = next((f"{words} {context[name]:g}" for name, words in BOUNDS.items() if name in context), None)
    return bound or EXPECTED.get(kind) or otherwise.removeprefix("Input should be ")
