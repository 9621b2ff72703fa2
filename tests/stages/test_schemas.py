"""The committed schemas are the ones that the code would print now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.stages.schemas import SCHEMAS, schema_text

FOLDER = Path(__file__).resolve().parents[2] / "schemas"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_committed_schema_is_current(name: str) -> None:
    committed = (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(name), "run: python tools/make_schemas.py"


def test_no_schema_file_without_a_model() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.schema.json" for name in SCHEMAS}


@pytest.mark.parametrize("name", ["report", "provenance", "config", "eval", "gate"])
def test_every_plain_field_is_described(name: str) -> None:
    schema: dict[str, Any] = json.loads(schema_text(name))
    parts = [schema, *schema["$defs"].values()]
    bare = [
        (part.get("title"), field)
        for part in parts
        for field, spec in part.get("properties", {}).items()
        if "description" not in spec and "$ref" not in spec
    ]
    assert bare == []
