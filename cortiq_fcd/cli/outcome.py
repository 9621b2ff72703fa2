"""What `convert` prints: what was written, or would be."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.display import figures

if TYPE_CHECKING:
    from cortiq_fcd.io.hf.importing import Import
    from cortiq_fcd.io.writer import WrittenFile
    from cortiq_fcd.stages.config import PolishConfig
    from cortiq_fcd.stages.estimate import Forecast
    from cortiq_fcd.stages.report import Report

SCHEMA, FORECAST_SCHEMA = "cortiq-convert/1", "cortiq-convert-forecast/1"


def document(source: Path, out: Path, quant: str, planned: Import, written: WrittenFile) -> dict[str, Any]:
    """The converter's JSON."""
    return {
        "schema": SCHEMA,
        "output": {"path": str(out), "bytes": written.bytes, "dir_hash": written.dir_hash},
        **_plan_facts(planned, source, quant),
        "intermediate": None,
        "polish": None,
    }


def _plan_facts(planned: Import, source: Path, quant: str) -> dict[str, Any]:
    arch = planned.header["arch"]
    fallbacks = [
        {"tensor": name, "asked": chosen.instead_of.label, "got": chosen.dtype.label, "why": chosen.why}
        for name, chosen in planned.dtypes.items()
        if chosen.instead_of is not None
    ]
    return {
        "source": {"path": str(source), "arch_name": arch["arch_name"], "layers": arch["num_layers"]},
        "quant": quant,
        "tensors": dict(sorted(Counter(chosen.dtype.label for chosen in planned.dtypes.values()).items())),
        "fallbacks": fallbacks,
        "o1_attn": (planned.header.get("provenance") or {}).get("o1_attn"),
        "notes": list(planned.notes),
    }


def polished(report: Report, out: Path, settings: PolishConfig, kept: Path | None) -> dict[str, Any]:
    """What a polish changes in the document."""
    from cortiq_fcd.stages.sentence import sentence

    where = settings.output.report or out.with_name(out.name + ".report.json")
    return {
        "output": {"path": str(out), "bytes": report.output.bytes, "dir_hash": report.output.dir_hash},
        "o1_attn": None if settings.train.polish_only else _recorded(out),
        "intermediate": str(kept) if kept else None,
        "polish": {"report": str(where), "outcome": report.outcome, "sentence": sentence(report)},
    }


def _recorded(out: Path) -> Any:
    from cortiq_fcd.io.reader import open_model

    with open_model(out) as model:
        return (model.header.get("provenance") or {}).get("o1_attn")


def tell(document: dict[str, Any], json_wanted: bool) -> None:
    """Print the document, or its gist."""
    if json_wanted:
        write_json(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        return
    output, counts = document["output"], document["tensors"]
    kinds = ", ".join(f"{number} {label}" for label, number in counts.items())
    write_text(f"{output['path']}: {output['bytes']:,} bytes ({kinds}), dir_hash {output['dir_hash']}\n")
    if document["intermediate"]:
        write_text(f"{document['intermediate']}: the converted file, not polished\n")
    if document["polish"]:
        write_text(f"{document['polish']['sentence']}\n{document['polish']['report']}: the whole report\n")


def tell_forecast(facts: dict[str, Any], polish: Forecast | None, json_wanted: bool) -> None:
    """Print what `--dry-run` asks for: `conversion_forecast`'s facts and the polish's. ResourceError, after it, if the
    polish would not fit.
    """
    from cortiq_fcd.cli.forecast import lines, refuse_if_too_large

    if json_wanted:
        whole = {**facts, "polish": asdict(polish) if polish else None}
        write_json(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    else:
        shown = [*_forecast_lines(facts), *(["", "then the polish", *lines(polish)] if polish else [])]
        write_text("".join(f"{line}\n" for line in shown))
    if polish:
        refuse_if_too_large(polish)


def conversion_forecast(planned: Import, source: Path, out: Path, quant: str) -> dict[str, Any]:
    """What a conversion would write and need; of memory, beside what the process has in use now."""
    from cortiq_fcd.io.writer import expected_bytes
    from cortiq_fcd.stages.capacity import available_bytes, resident_bytes

    models = [planned.as_model(out, largest=largest) for largest in (False, True)]
    least, most = (expected_bytes(model, header=planned.header, replace={}) for model in models)
    sizes: dict[str, dict[str, int]] = {}
    for name, chosen in planned.dtypes.items():
        entry = sizes.setdefault(chosen.dtype.label, {"tensors": 0, "bytes": 0, "most_bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += models[0].tensors[name].nbytes
        entry["most_bytes"] += models[1].tensors[name].nbytes
    in_use = resident_bytes()
    return {
        "schema": FORECAST_SCHEMA,
        **{key: value for key, value in _plan_facts(planned, source, quant).items() if key != "tensors"},
        "tensors": dict(sorted(sizes.items())),
        "output": {"path": str(out), "bytes": least, "most_bytes": most},
        "disk_free": shutil.disk_usage(out.absolute().parent).free,
        "memory": {
            "peak": in_use + planned.memory_bytes(),
            "tensor": planned.memory_bytes(),
            "in_use": in_use,
            "available": available_bytes(),
        },
    }


def _forecast_lines(facts: dict[str, Any]) -> Iterator[str]:
    output, memory = facts["output"], facts["memory"]
    for label, entry in facts["tensors"].items():
        yield f"{label:<21}{entry['tensors']} tensors, {_between(entry['bytes'], entry['most_bytes'])}"
    yield f"converted file       {_between(output['bytes'], output['most_bytes'])}"
    yield f"disk free            {figures.size(facts['disk_free'])}"
    yield f"memory, at most      {figures.size(memory['peak'])}"
    yield f"  program            {figures.size(memory['in_use'])}"
    yield f"  one tensor         {figures.size(memory['tensor'])}"
    if memory["available"] is not None:
        yield f"memory available     {figures.size(memory['available'])} more"


def _between(least: int, most: int) -> str:
    return f"{least:,} bytes" if least == most else f"{least:,} to {most:,} bytes, as the weights will be"
