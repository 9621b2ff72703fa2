"""Writes schemas/*.schema.json from the pydantic models: python tools/make_schemas.py."""

from __future__ import annotations

from pathlib import Path

from cortiq_fcd.stages.schemas import SCHEMAS, schema_text

FOLDER = Path(__file__).resolve().parent.parent / "schemas"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        (FOLDER / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
