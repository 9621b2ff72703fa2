"""What a file holds and what a polish could do with it, from header and directory alone: no torch, no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortiq_fcd.errors import ConfigError, UnsupportedModelError
from cortiq_fcd.io.layout import SECTIONS
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.conversion import resolve_conversion
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.stages.config import TrainConfig


@dataclass(frozen=True)
class DtypeShare:
    """The tensors of one dtype."""

    dtype: str
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Possible:
    """What a polish would do at its defaults; `m`, `w`, `sink` as the file says, else the defaults."""

    layers: list[int]
    trainable_params: int
    params: int
    m: int
    w: int
    sink: int
    notes: list[str]


@dataclass(frozen=True)
class Inspection:
    """Everything that `inspect` tells; `polish` is null when the model can't be polished, and `refusal` says why."""

    path: str
    shards: int
    bytes: int
    dir_hash: str
    required_features: int
    sections: dict[str, int]  # bytes, of shard 1
    dtypes: list[DtypeShare]
    arch: dict[str, Any]
    header_keys: list[str]
    o1_attn: Any
    fcd: Any
    polish: Possible | None
    refusal: str


def inspect_model(model: CmfModel, file: Path) -> Inspection:
    """Gather what `inspect` tells, from the header and the directory alone."""
    header = model.header
    provenance = header.get("provenance") or {}
    spans = model.files[0].envelope.spans
    polish, refusal = _polishable(model, provenance)
    return Inspection(
        path=str(file),
        shards=len(model.paths),
        bytes=model.bytes_total,
        dir_hash=model.dir_hash,
        required_features=model.required_features,
        sections={name: spans[name].nbytes for name in SECTIONS},
        dtypes=_dtype_shares(model),
        arch=header.get("arch") or {},
        header_keys=list(header),
        o1_attn=provenance.get("o1_attn"),
        fcd=provenance.get("fcd"),
        polish=polish,
        refusal=refusal,
    )


def _dtype_shares(model: CmfModel) -> list[DtypeShare]:
    shares: dict[str, list[int]] = {}
    for record in model.tensors.values():
        share = shares.setdefault(record.dtype.label, [0, 0, 0])
        share[0] += 1
        share[1] += math.prod(record.shape)
        share[2] += record.nbytes
    return [DtypeShare(name, *share) for name, share in sorted(shares.items(), key=lambda item: -item[1][2])]


def _polishable(model: CmfModel, provenance: Any) -> tuple[Possible | None, str]:
    recipe = TrainConfig()
    try:
        plan = plan_model(model)
    except UnsupportedModelError as error:
        return None, error.message
    try:
        conversion, notes = resolve_conversion(
            plan, provenance, layers=None, m=None, w=None, sink=None, prefill=None, seq=recipe.seq
        )
    except ConfigError as error:
        return None, "; ".join(filter(None, (error.message, error.hint)))
    names = [name for i in conversion.layers for name in plan.layers[i].trainable]
    possible = Possible(
        layers=list(conversion.layers),
        trainable_params=sum(math.prod(plan.shapes[name]) for name in names),
        params=plan.params,
        m=conversion.m,
        w=conversion.w,
        sink=conversion.sink,
        notes=[*notes, *_never_converted(plan)],
    )
    return possible, ""


def _never_converted(plan: ModelPlan) -> list[str]:
    """Which layers no setting converts, one note a reason."""
    layers: dict[str, list[int]] = {}
    for layer in plan.layers:
        if layer.mixer.obstacle:
            layers.setdefault(layer.mixer.obstacle, []).append(layer.index)
    return [
        f"never converted: layer{'s' if len(which) > 1 else ''} {', '.join(map(str, which))} ({why}); "
        "--polish-only trains such layers"
        for why, which in layers.items()
    ]
