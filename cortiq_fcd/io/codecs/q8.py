"""q8_row and q8_2f: one int8 a weight, with f16 scales by row, or by row and column.

q8_row  rows*cols int8 | rows f16                 w = q * row[o]                  row = absmax(row) / 127
q8_2f   rows*cols int8 | rows f16 | cols f16      w = (q * row[o]) * col[i]       in this order
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs.codec import (
    Payload,
    Shape,
    Weights,
    f16_scales,
    matrix,
    quantise,
    require_finite,
    require_size,
    row_blocks,
)

_BALANCE_ROUNDS = 8  # the error settles by then
_F16_MIN_NORMAL = 2.0**-14


def q8_row_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """A byte a weight and 2 a row; 2-D only."""
    rows, cols = matrix(shape)
    return rows * cols + 2 * rows


def q8_2f_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """A byte a weight, 2 a row and 2 a column; 2-D only."""
    rows, cols = matrix(shape)
    return rows * cols + 2 * rows + 2 * cols


def decode_q8_row(payload: Payload, shape: Shape) -> Weights:
    """q * row scale, one f32 rounding."""
    rows, cols = matrix(shape)
    require_size(payload, q8_row_nbytes(shape))
    return _times_rows(payload, rows, cols)


def decode_q8_2f(payload: Payload, shape: Shape) -> Weights:
    """(q * row scale) * column scale, rounded to f32 after each product."""
    rows, cols = matrix(shape)
    require_size(payload, q8_2f_nbytes(shape))
    weights = _times_rows(payload, rows, cols)
    weights *= payload[rows * cols + 2 * rows :].view("<f2").astype(np.float32)
    return weights


def encode_q8_row(weights: Weights) -> Payload:
    """Scale absmax / 127, rounded to f16 before quantising; EncodeError for NaN, Inf and scales above f16."""
    matrix(weights.shape)
    require_finite(weights)
    return _quantise_rows(weights, np.empty(0, "<f2"))


def encode_q8_2f(weights: Weights) -> Payload:
    """Row and column scales that level the largest entries of all rows and columns; errors as q8_row."""
    matrix(weights.shape)
    require_finite(weights)
    return _quantise_rows(weights, f16_scales(_level_columns(weights)))


def _times_rows(payload: Payload, rows: int, cols: int) -> Weights:
    n = rows * cols
    q = payload[:n].view(np.int8).reshape(rows, cols)
    row = payload[n : n + 2 * rows].view("<f2").astype(np.float32)
    return np.multiply(q, row[:, None], dtype=np.float32)


def _quantise_rows(weights: Weights, col: npt.NDArray[np.float16]) -> Payload:
    """The payload for these column scales; none of them: q8_row."""
    rows, cols = weights.shape
    payload = np.empty(rows * cols + 2 * rows + 2 * col.size, np.uint8)
    q = payload[: rows * cols].view(np.int8).reshape(rows, cols)
    row = payload[rows * cols : rows * cols + 2 * rows].view("<f2")
    payload[rows * cols + 2 * rows :] = col.view(np.uint8)
    for block in row_blocks(rows, cols):
        levelled = weights[block]
        if col.size:
            with np.errstate(over="ignore"):  # an infinite scale is refused next
                levelled = np.divide(levelled, col.astype(np.float32), dtype=np.float32)
        row[block] = f16_scales(np.abs(levelled).max(axis=1, initial=0.0) / np.float32(127))
        q[block] = quantise(levelled, row[block].astype(np.float32)[:, None], -127, 127)
    return payload


def _level_columns(weights: Weights) -> Weights:
    """Column scales, of geometric mean 1 where f16 allows, that with the best row scales level all rows and columns.

    Each round moves half of every row's and column's excess, as a square root, into its scale: a damped form of
    equilibrating a matrix by its largest entries. Moving all of it at once would favour whichever side goes first.
    """
    rows, cols = weights.shape
    row, col = np.ones(rows), np.ones(cols)
    if not weights.size:
        return col.astype(np.float32)
    for _ in range(_BALANCE_ROUNDS):
        row_max, col_max = np.zeros(rows), np.zeros(cols)
        for block in row_blocks(rows, cols):
            left = np.abs(weights[block]) / (row[block, None] * col)
            row_max[block] = left.max(axis=1)
            np.maximum(col_max, left.max(axis=0), out=col_max)
        row *= np.sqrt(np.where(row_max > 0, row_max, 1.0))
        col *= np.sqrt(np.where(col_max > 0, col_max, 1.0))
    col /= np.exp(np.log(col).mean())
    col /= max(1.0, col.max() * _F16_MIN_NORMAL)  # a huge column pushes the others down rather than being cut
    return np.maximum(col, _F16_MIN_NORMAL).astype(np.float32)
