"""Encodes large matrices a block of rows at a time, so that no f32 copy of a whole one is ever in memory.

Possible where a dtype looks at one row at a time: its payload is then a few runs with the same bytes for every row.

    q8_row   rows * cols int8 | rows * 2      q4_tiled   rows * 18 g      (g = cols / 32)
    q4_block rows * 16 g | rows * 2 g         q4tp       rows * 16 g | rows * 4 | rows * ceil(5 g / 8)

The bytes are those that the codec gives for the whole matrix; a test holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs import CODECS, EncodeError
from cortiq_fcd.io.hf.names import Placed
from cortiq_fcd.io.layout import GROUP, DType

BLOCK_WEIGHTS = 1 << 22
SCRATCH_BYTES = 12 * BLOCK_WEIGHTS  # what codecs allocate beside the payload, for one block or for a small tensor

_ROW_BYTES: Mapping[DType, Callable[[int], tuple[int, ...]]] = {
    DType.F32: lambda cols: (4 * cols,),
    DType.F16: lambda cols: (2 * cols,),
    DType.BF16: lambda cols: (2 * cols,),
    DType.Q8_ROW: lambda cols: (cols, 2),
    DType.Q4_BLOCK: lambda cols: (cols // 2, cols // 16),
    DType.Q4_TILED: lambda cols: (18 * cols // GROUP,),
    DType.Q4TP: lambda cols: (cols // 2, 4, -(-cols // GROUP * 5 // 8)),
}


def weights_or_payload(tensor: Placed, dtype: DType) -> npt.NDArray[Any]:
    """What the writer is given: f32 weights [shape] to encode, or, where that saves memory, the payload as uint8."""
    if not _goes_by_rows(tensor, dtype):
        return tensor.read()
    try:
        return _encode_by_rows(tensor, dtype, *tensor.shape)
    except EncodeError:
        return tensor.read()  # the writer meets it again, and tells the place in the whole matrix


def peak_bytes(tensor: Placed, dtype: DType, payload_bytes: int) -> int:
    """The most memory that reading and encoding one tensor takes; a test holds it against what is allocated."""
    if _goes_by_rows(tensor, dtype):
        return payload_bytes + SCRATCH_BYTES
    read = math.prod(tensor.stored.shape) if tensor.rows is not None else 0
    return 4 * (math.prod(tensor.shape) + read) + 2 * payload_bytes + SCRATCH_BYTES


def _goes_by_rows(tensor: Placed, dtype: DType) -> bool:
    if tensor.rows is not None or len(tensor.shape) != 2 or dtype not in _ROW_BYTES:
        return False
    rows, cols = tensor.shape
    return rows * cols > BLOCK_WEIGHTS and not (dtype == DType.Q4_BLOCK and cols % GROUP)


def _encode_by_rows(tensor: Placed, dtype: DType, rows: int, cols: int) -> npt.NDArray[np.uint8]:
    encode = CODECS[dtype].encode
    if encode is None:
        raise ValueError(f"{dtype.label} can't be written")
    widths = _ROW_BYTES[dtype](cols)
    payload = np.empty(rows * sum(widths), np.uint8)
    step = max(1, BLOCK_WEIGHTS // cols)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = encode(tensor.stored.read_rows(start, stop))
        for target, source in zip(_runs(payload, rows, widths), _runs(block, stop - start, widths), strict=True):
            target[start:stop] = source
    return payload


def _runs(payload: npt.NDArray[np.uint8], rows: int, widths: tuple[int, ...]) -> list[npt.NDArray[np.uint8]]:
    """Views [rows, width] of the payload's runs."""
    ends = np.cumsum(widths) * rows
    return [payload[end - rows * width : end].reshape(rows, width) for end, width in zip(ends, widths, strict=True)]
