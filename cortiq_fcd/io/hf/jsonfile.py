"""JSON files of a model directory: read strictly, and consumed key by key so that nothing is ignored unseen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from cortiq_fcd.errors import CmfFormatError, ConfigError, UnsupportedModelError

MOST_BYTES = (
    64 << 20
)  # of a JSON file here; the largest real ones (indices, vocabularies in tokenizer_config) have a few


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; CmfFormatError for anything else, ConfigError when the file can't be read."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise CmfFormatError(path, "too large for a JSON file", expected=f"at most {MOST_BYTES} bytes", got=size)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    return parse_object(data, path)


def parse_object(data: bytes, path: Path, offset_bytes: int | None = None) -> dict[str, Any]:
    """`data` as a JSON object; CmfFormatError for bad syntax, doubled keys, NaN and Infinity, or another JSON value."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = f"not valid JSON ({error or 'nested too deep'})"
        raise CmfFormatError(path, what, offset_bytes=offset_bytes) from None
    if not isinstance(value, dict):
        raise CmfFormatError(path, "JSON", offset_bytes=offset_bytes, expected="an object", got=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        double = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {double[:80]!r} appears twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


class Settings:
    """Keys of config.json, taken one by one; null counts as absent. What is left is refused by `finish`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json: ") -> None:
        self._left = {key: value for key, value in values.items() if value is not None}
        self._mentioned = frozenset(values)
        self.where = where

    def silent(self, key: str) -> bool:
        """Whether the file does not mention the key at all, not even as null."""
        return key not in self._mentioned

    def has(self, key: str) -> bool:
        """Whether the key is there, not null and not taken yet."""
        return key in self._left

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, of the JSON type `kind` (an int counts as float); UnsupportedModelError for another type, or
        when there is neither value nor default.
        """
        value = self._left.pop(key, default)
        if value is None:
            raise UnsupportedModelError(self.where + key, f"the key is missing; expected {kind.__name__}")
        if kind is float and type(value) is int and value.bit_length() < 1024:  # more is no float
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise UnsupportedModelError(self.where + key, f"expected {kind.__name__}, got {str(value)[:80]!r}")
        return value

    def size(self, key: str, default: int | None = None, *, most: int = (1 << 32) - 1) -> int:
        """A positive whole number."""
        value: int = self.take(key, int, default)
        if not 1 <= value <= most:
            raise UnsupportedModelError(self.where + key, f"expected 1 to {most}, got {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value: float = self.take(key, float, default)
        if value <= 0:
            raise UnsupportedModelError(self.where + key, f"expected a positive number, got {value}")
        return value

    def maybe(self, key: str) -> Any:
        """The value whatever it is, None when absent."""
        return self._left.pop(key, None)

    def refuse(self, key: str, why: str) -> NoReturn:
        """UnsupportedModelError that names the key."""
        raise UnsupportedModelError(self.where + key, why)

    def finish(self, informational: Mapping[str, str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse the first key left that is neither informational nor at one of its neutral values."""
        for key, value in self._left.items():
            if key in informational:
                continue
            allowed = neutral.get(key)
            if allowed is None:
                self.refuse(key, f"not known (value {str(value)[:80]}), and leaving it out could make another model")
            if not any(type(value) is type(a) and value == a for a in allowed):
                self.refuse(key, f"only {allowed[0]!r} is supported, got {str(value)[:80]}")
