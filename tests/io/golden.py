"""Where the reference data lies: beside the checkout. Where it is not, tests that need it are skipped with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no reference data at {GOLDEN}")
FILES = sorted(GOLDEN.glob("*/*.cmf"))


def recorded_hashes() -> dict[str, Any]:
    return json.loads((GOLDEN / "hashes.json").read_text("utf-8")) if GOLDEN.is_dir() else {}
