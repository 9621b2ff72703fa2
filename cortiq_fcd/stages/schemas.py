"""JSON schemas of everything that other programs read or write, made from the pydantic models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from cortiq_fcd.events import Event
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.readings import EvalReport, GateReport
from cortiq_fcd.stages.report import Provenance, Report

Schema = dict[str, Any]

SCHEMAS: dict[str, Callable[[], Schema]] = {
    "report": lambda: Report.model_json_schema(mode="serialization"),
    "provenance": lambda: Provenance.model_json_schema(mode="serialization"),
    "config": lambda: PolishConfig.model_json_schema(mode="validation"),
    "eval": lambda: EvalReport.model_json_schema(mode="serialization"),
    "gate": lambda: GateReport.model_json_schema(mode="serialization"),
    "event": lambda: TypeAdapter[Event](Event).json_schema(mode="serialization"),
}


def schema_text(name: str) -> str:
    """One schema as JSON text, as it is committed in schemas/NAME.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMAS[name]()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
