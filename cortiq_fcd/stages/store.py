"""The trained tensors as OUT will hold them, put back into the masters so that what is measured is what is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cortiq_fcd.io.codecs import CODECS, EncodeError
from cortiq_fcd.io.layout import DType
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.stages.artefacts import Stored
from cortiq_fcd.stages.config import OutputConfig

_QUANTISED = (DType.Q8_ROW, DType.Q8_2F)


def stored_dtype(config: OutputConfig, shape: tuple[int, ...]) -> DType:
    """The dtype of a trained tensor: --save-dtype, but f32 for norm gains that a row-wise format can't hold."""
    wanted = DType[config.save_dtype.upper()]
    return DType.F32 if wanted in _QUANTISED and len(shape) != 2 else wanted


def run(config: OutputConfig, replica: Replica) -> Stored:
    """Encode the masters; the masters become the decoded values.

    A tensor with values that the dtype can't hold (f16 ends at 65504) stays f32, and a note says so.
    """
    tensors: dict[str, tuple[DType, NDArray[Any]]] = {}
    notes = []
    for name, master in replica.masters.named.items():
        values = np.ascontiguousarray(master.cpu().numpy())
        dtype = stored_dtype(config, values.shape)
        encode = CODECS[dtype].encode
        if dtype is DType.F32 or encode is None:
            tensors[name] = (DType.F32, values)
            continue
        try:
            payload = encode(values)
        except EncodeError as error:
            notes.append(f"{name} is stored as f32: {error.what}")
            tensors[name] = (DType.F32, values)
            continue
        master.copy_(torch.from_numpy(CODECS[dtype].decode(payload, values.shape)))
        tensors[name] = (dtype, payload)
    return Stored(tensors, tuple(notes))
