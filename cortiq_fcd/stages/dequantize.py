"""Stage 1: every tensor of the file as f32, laid out as the products want it.

Each payload's hash is checked when it is first read, and NaN or Inf ends the run then: training on such a model could
only spread them. The file is read piece by piece, not mapped, because mapped pages count as memory of the process.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cortiq_fcd.errors import NonFiniteWeightsError
from cortiq_fcd.io.container import CHUNK_BYTES
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.layer_parts import Part
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.ranks import Ranks
from cortiq_fcd.model.streaming import Room
from cortiq_fcd.model.weights import FrozenWeights, load_weights

# Elements converted at a time: so few that torch does it on the calling thread, beside one that computes.
_CONVERTED = 1 << 15
_AS_IT_LIES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


def run(
    model: CmfModel,
    plan: ModelPlan,
    device: torch.device,
    streamed: frozenset[Part] = frozenset(),
    room: Room | None = None,
    divided: Ranks | None = None,
) -> FrozenWeights:
    """Decode the tensors that the plan names; the last three arguments as in `load_weights`. The model must stay open.

    Raises CmfFormatError (damaged) or NonFiniteWeightsError, both exit 3: at once, or when a streamed part is visited
    for the first time.
    """
    return load_weights(plan, Unpacker(model), device, streamed, room, divided)


def unpack_bytes(model: AnyModel, plan: ModelPlan) -> int:
    """Most memory that decoding one tensor takes beside its values."""
    records = [model.tensors[name] for name in plan.shapes]
    return max((r.nbytes + 4 * math.prod(r.shape) for r in records if r.dtype not in _AS_IT_LIES), default=CHUNK_BYTES)


class Unpacker:
    """Decodes tensors of a file into given ones, a `Fill`."""

    def __init__(self, model: CmfModel) -> None:
        self._model = model
        self._checked: set[str] = set()

    def __call__(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor's values. Raises what `run` does."""
        values = out if out.device.type == "cpu" and out.is_contiguous() else torch.empty(out.shape)
        first = name not in self._checked
        kind = _AS_IT_LIES.get(self._model.tensors[name].dtype)
        if kind is None:
            _unpack(self._model, name, values.numpy(), check_hash=first)
        else:
            _convert(self._model, name, kind, values.view(-1), check_hash=first)
        if first:
            _require_finite(self._model, name, values.numpy())
            self._checked.add(name)
        if values is not out:
            out.copy_(values)


def _convert(model: CmfModel, name: str, kind: torch.dtype, out: Tensor, *, check_hash: bool) -> None:
    at = 0
    for piece in model.chunks(name, check_hash=check_hash):
        for part in torch.split(torch.frombuffer(piece, dtype=kind), _CONVERTED):
            out[at : at + len(part)].copy_(part)
            at += len(part)


def _unpack(model: CmfModel, name: str, out: np.ndarray, *, check_hash: bool) -> None:
    payload = np.empty(model.tensors[name].nbytes, np.uint8)
    at = 0
    for piece in model.chunks(name, check_hash=check_hash):
        payload[at : at + len(piece)] = piece
        at += len(piece)
    np.copyto(out, model.decode_payload(name, payload))


def _require_finite(model: CmfModel, name: str, values: np.ndarray) -> None:
    # A sum is not finite as soon as one element is not; it is the cheapest pass over the whole tensor.
    with np.errstate(invalid="ignore"):  # Inf - Inf is the NaN that is looked for, not a reason to warn
        total = values.sum(dtype=np.float64)
    if np.isfinite(total):
        return
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        index = [int(i) for i in np.unravel_index(bad[0], values.shape)]
        raise NonFiniteWeightsError(
            model.tensors[name].path,
            f"{len(bad)} of {values.size} weights are not finite, the first at {index}",
            tensor=name,
            expected="finite numbers",
            got=values.flat[bad[0]],
            hint="the model was damaged before or during conversion: convert it again from the original",
        )
