"""A file opened to be measured, not polished: its attention as the file, or a flag, says; and who measures."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from cortiq_fcd.io.corpus import Text
from cortiq_fcd.io.paths import printable
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.conversion import Conversion, resolve_conversion
from cortiq_fcd.model.plan import ModelPlan, eos_notes, plan_model
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.untrained import untrained
from cortiq_fcd.stages import dequantize
from cortiq_fcd.stages.config import O1Config
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.readings import TextInfo
from cortiq_fcd.stages.report import LayerCost, O1Info, SourceInfo

NO_SETTING = "the file has no provenance.o1_attn, and no --o1 was given: its attention is exact"


@dataclass(frozen=True)
class Reading:
    """A file that can be measured. `exact_only` says why its attention is exact; empty if some layers are converted."""

    model: CmfModel
    plan: ModelPlan
    conversion: Conversion
    exact_only: str

    def load(self, device: torch.device, progress: Progress) -> Replica:
        """Its weights, to be read only. Raises as `dequantize`."""
        with progress.stage("dequantize", f"{len(self.plan.shapes)} tensors of {printable(self.model.path)}"):
            return untrained(dequantize.run(self.model, self.plan, device), self.conversion)

    def o1(self, prefill: int, costs: list[LayerCost] | None = None) -> O1Info | None:
        """The O(1) kernel as it is used."""
        return None if self.exact_only else O1Info(**self.conversion.record(), prefill=prefill, costs=costs)


def open_reading(model: CmfModel, o1: O1Config, seq: int, prefill: int | None, progress: Progress) -> Reading:
    """Plan a file. Without a setting of its own, and without flags, it is exact. Raises as `plan_model`, and
    ConfigError for windows of `seq` tokens in which the O(1) kernel would never start.
    """
    plan = plan_model(model)
    progress.warn(*eos_notes(model.header, plan))
    provenance = model.header.get("provenance")
    hint = provenance.get("o1_attn") if isinstance(provenance, dict) else None
    flags = (o1.layers, o1.m, o1.w, o1.sink)
    exact_only = NO_SETTING if hint is None and all(flag is None for flag in flags) else ""
    conversion, notes = resolve_conversion(
        plan,
        provenance,
        layers=o1.layers,
        m=o1.m,
        w=o1.w,
        sink=o1.sink,
        prefill=prefill,
        seq=seq,
        polish_only=bool(exact_only),
    )
    progress.warn(*notes)
    return Reading(model, plan, conversion, exact_only)


def source_info(model: CmfModel, plan: ModelPlan) -> SourceInfo:
    """The file in short."""
    return SourceInfo(
        path=printable(model.path),
        bytes=model.bytes_total,
        dir_hash=model.dir_hash,
        arch_name=plan.arch_name,
        layers=len(plan.layers),
        params=plan.params,
    )


def text_info(text: Text) -> TextInfo:
    """The text in short."""
    return TextInfo(source=printable(text.source), sha256=text.sha256, tokens=len(text.ids))


def now() -> str:
    """UTC time, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
