"""The JSON header, strictly: what is accepted can be written again, key for key, and printed anywhere."""

from __future__ import annotations

import json
import math
import os
from typing import Any, NoReturn

from cortiq_fcd.errors import CmfFormatError
from cortiq_fcd.io.layout import OPTIONAL_SECTIONS, VERSION

MAX_DEPTH = 100  # far above any real header, far below Python's recursion limit (reading, copying and writing recurse)

_KEY_TYPES: dict[str, type] = {
    "arch": dict,
    "provenance": dict,
    "tokenizer_config": dict,
    "section_hashes": dict,
    "skills": list,
    "shard": dict,
}


def parse_header(data: bytes, path: str | os.PathLike[str], offset_bytes: int) -> dict[str, Any]:
    """The header as a dict in the file's key order; CmfFormatError for anything that JSON or the format does not allow.

    Refused besides bad syntax: duplicate keys, NaN and Infinity, numbers that only fit as infinity, nesting deeper
    than MAX_DEPTH, strings that are not Unicode text, known keys of a wrong type. Unknown keys are kept.
    """

    def fail(what: str, **details: object) -> NoReturn:
        raise CmfFormatError(path, f"header: {what}", offset_bytes=offset_bytes, **details)  # type: ignore[arg-type]

    try:
        header = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except UnicodeDecodeError as error:
        fail(f"not UTF-8 ({error.reason} at byte {error.start} of the header)")
    except RecursionError:
        fail(f"nested deeper than {MAX_DEPTH} levels")
    except ValueError as error:  # JSONDecodeError, our hooks, and Python's limit on the digits of an integer
        fail(f"not valid JSON ({error})")
    if not isinstance(header, dict):
        fail("not a JSON object", expected="an object", got=type(header).__name__)
    problem = _structure_problem(header) or _key_problem(header)
    if problem:
        fail(problem)
    return header


def dump_header(header: dict[str, Any]) -> bytes:
    """The header's bytes, keys in the dict's order; ValueError for NaN or Infinity."""
    return json.dumps(header, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def section_hash(header: dict[str, Any], section: str) -> int | None:
    """The recorded hash of masks, vocab or index; None where there is none (absent, null or zero)."""
    text = (header.get("section_hashes") or {}).get(section)
    return (int(text, 16) or None) if text is not None else None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {double[:80]!r} appears twice in one object")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _structure_problem(header: dict[str, Any]) -> str:
    """What is wrong with the depth or the strings of the tree, or ""; walks level by level, without recursion."""
    level: list[Any] = [header]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                children += node
                children += node.values()
            elif isinstance(node, list):
                children += node
            elif isinstance(node, str) and not _is_text(node):
                return f"the string {ascii(node)[:80]} holds half of a surrogate pair"
        level = children
        if not level:
            return ""
    return f"nested deeper than {MAX_DEPTH} levels"


def _is_text(string: str) -> bool:
    try:
        string.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _key_problem(header: dict[str, Any]) -> str:
    if header.get("format") != "cmf":
        return f"format is {_brief(header.get('format'))}, not 'cmf'"
    version = header.get("version")
    if type(version) is not int or version != VERSION:
        return f"version is {_brief(version)}, not {VERSION}"
    if header.get("arch") is None:
        return "arch is missing"
    for key, wanted in _KEY_TYPES.items():
        if header.get(key) is not None and not isinstance(header[key], wanted):
            return f"{key} is {_brief(header[key])}, not a JSON {'array' if wanted is list else 'object'}"
    for name in OPTIONAL_SECTIONS:
        text = (header.get("section_hashes") or {}).get(name)
        if text is not None and not _is_hash_text(text):
            return f"section_hashes.{name} is {_brief(text)}, not 16 hex digits"
    return ""


def _is_hash_text(text: object) -> bool:
    return isinstance(text, str) and len(text) == 16 and all(c in "0123456789abcdefABCDEF" for c in text)


def _brief(value: object) -> str:
    """A value for a message, cut short: hostile headers hold long ones."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
