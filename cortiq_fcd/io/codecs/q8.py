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
    row = f16_scales(np.abs(weights).max(axis=1, initial=0.0) / np.float32(127))
    q = quantise(weights, row.astype(np.float32)[:, None], -127, 127)
    return np.concatenate([q.reshape(-1).view(np.uint8), row.view(np.uint8)])


def encode_q8_2f(weights: Weights) -> Payload:
    """Row and column scales that level the largest entries of all rows and columns; errors as q8_row."""
    matrix(weights.shape)
    require_finite(weights)
    col = f16_scales(_level_columns(np.abs(weights)))
    with np.errstate(over="ignore"):  # an infinite scale is refused next
        levelled = np.divide(weights, col.astype(np.float32), dtype=np.float32)
    row = f16_scales(np.abs(levelled).max(axis=1, initial=0.0) / np.float32(127))
    q = quantise(levelled, row.astype(np.float32)[:, None], -127, 127)
    return np.concatenate([q.reshape(-1).view(np.uint8), row.view(np.uint8), col.view(np.uint8)])


def _times_rows(payload: Payload, rows: int, cols: int) -> Weights:
    n = rows * cols
    q = payload[:n].view(np.int8).reshape(rows, cols)
    row = payload[n : n + 2 * rows].view("<f2").astype(np.float32)
    return np.multiply(q, row[:, None], dtype=np.float32)


def _level_columns(magnitudes: Weights) -> Weights:
    """Column scales, of geometric mean 1 where f16 allows, that with the best row scales level all rows and columns.

    Each round moves half of every row's and column's excess, as a square root, into its scale: a damped form of
    equilibrating a matrix by its largest entries. Moving all of it at once would favour whichever side goes first.
    """
    left = magnitudes.astype(np.float64)
    col = np.ones(left.shape[1])
    for _ in range(_BALANCE_ROUNDS):
        row_excess, col_excess = _root_of_max(left, axis=1), _root_of_max(left, axis=0)
        left /= row_excess[:, None] * col_excess
        col *= col_excess
    if not col.size:
        return col.astype(np.float32)
    col /= np.exp(np.log(col).mean())
    col /= max(1.0, col.max() * _F16_MIN_NORMAL)  # a huge column pushes the others down rather than being cut
    return np.maximum(col, _F16_MIN_NORMAL).astype(np.float32)


def _root_of_max(magnitudes: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    largest = magnitudes.max(axis=axis, initial=0.0)
    return np.sqrt(np.where(largest > 0, largest, 1.0))
