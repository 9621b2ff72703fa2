"""q1, q1s, q1t: one sign or one ternary digit a weight, an f16 scale for each group of 32; 2-D, cols % 32 == 0.

    q1   per tile: f16, 4 sign bytes            bit k of byte j (lowest first) is weight 8j+k: 1 -> +s, 0 -> -s
    q1s  q1 tiles | u32 count | count x (u32 flat index, f16 value)
    q1t  per tile: f16, 7 bytes of 5 base-3 digits (lowest first; 0 -> 0, 1 -> +s, 2 -> -s; the last 3 digits unused)
         | u32 row_ptr[rows+1] | entries (u16 col, f16 value), those of row r at row_ptr[r] .. row_ptr[r+1]

An overlay entry overwrites the base weight. Of several for one weight the last one counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs.codec import (
    Payload,
    PayloadError,
    Shape,
    Weights,
    grouped_matrix,
    require_payload,
    require_size,
)
from cortiq_fcd.io.layout import GROUP

_SIGN_TILE = np.dtype([("scale", "<f2"), ("signs", "u1", GROUP // 8)])
_DIGIT_BYTES = 7
_DIGIT_TILE = np.dtype([("scale", "<f2"), ("digits", "u1", _DIGIT_BYTES)])
_FLAT_ENTRY = np.dtype([("index", "<u4"), ("value", "<f2")])
_ROW_ENTRY = np.dtype([("col", "<u2"), ("value", "<f2")])
_BLOCK_TILES = 4096

# The five weights of a digit byte, in units of the scale, and the eight of a sign byte.
_TERNARY = np.array([[(0, 1, -1)[byte // 3**k % 3] for k in range(5)] for byte in range(256)], np.int8)
_SIGNS = np.array([[1 if byte >> k & 1 else -1 for k in range(8)] for byte in range(256)], np.int8)
_SIGN_WORDS = _SIGNS.view(np.uint64).reshape(256)


def q1_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """6 bytes a tile."""
    rows, groups = grouped_matrix(shape)
    return rows * groups * _SIGN_TILE.itemsize


def q1s_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """The q1 tiles, the count, and as many entries as the count says."""
    base = q1_nbytes(shape)
    count = _read_u32(require_payload(payload), base, "the entry count")
    return base + 4 + count * _FLAT_ENTRY.itemsize


def q1t_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """The tiles, the row pointers, and as many entries as the last pointer says."""
    rows, groups = grouped_matrix(shape)
    pointers_at = rows * groups * _DIGIT_TILE.itemsize
    count = _read_u32(require_payload(payload), pointers_at + 4 * rows, "the last row pointer")
    return pointers_at + 4 * (rows + 1) + count * _ROW_ENTRY.itemsize


def check_q1s(payload: Payload, shape: Shape) -> None:
    """Length, and every index inside the tensor."""
    require_size(payload, q1s_nbytes(shape, payload))
    entries_at = q1_nbytes(shape) + 4
    index = payload[entries_at:].view(_FLAT_ENTRY)["index"]
    outside = np.flatnonzero(index >= shape[0] * shape[1])
    if outside.size:
        at = entries_at + int(outside[0]) * _FLAT_ENTRY.itemsize
        raise PayloadError(
            "overlay index outside the tensor",
            offset_bytes=at,
            expected=f"below {shape[0] * shape[1]}",
            got=int(index[outside[0]]),
        )


def check_q1t(payload: Payload, shape: Shape) -> None:
    """Length, row pointers from 0 and never falling, every column inside the row."""
    require_size(payload, q1t_nbytes(shape, payload))
    rows, groups = grouped_matrix(shape)
    pointers_at = rows * groups * _DIGIT_TILE.itemsize
    entries_at = pointers_at + 4 * (rows + 1)
    pointers = payload[pointers_at:entries_at].view("<u4")
    if pointers[0] != 0:
        raise PayloadError("first row pointer", offset_bytes=pointers_at, expected=0, got=int(pointers[0]))
    falls = np.flatnonzero(pointers[1:] < pointers[:-1])
    if falls.size:
        at = pointers_at + 4 * (int(falls[0]) + 1)
        raise PayloadError("a row pointer below the one before it", offset_bytes=at)
    col = payload[entries_at:].view(_ROW_ENTRY)["col"]
    outside = np.flatnonzero(col >= shape[1])
    if outside.size:
        at = entries_at + int(outside[0]) * _ROW_ENTRY.itemsize
        raise PayloadError(
            "overlay column outside the row", offset_bytes=at, expected=f"below {shape[1]}", got=int(col[outside[0]])
        )


def decode_q1(payload: Payload, shape: Shape) -> Weights:
    """+scale or -scale."""
    require_size(payload, q1_nbytes(shape))
    tiles = payload.view(_SIGN_TILE)
    weights = np.empty((tiles.size, GROUP), np.float32)
    for start in range(0, tiles.size, _BLOCK_TILES):
        block = tiles[start : start + _BLOCK_TILES]
        signs = _SIGN_WORDS[block["signs"]].view(np.int8)
        np.multiply(signs, block["scale"].astype(np.float32)[:, None], out=weights[start : start + _BLOCK_TILES])
    return weights.reshape(shape)


def decode_q1s(payload: Payload, shape: Shape) -> Weights:
    """q1, then the overlay."""
    check_q1s(payload, shape)
    base = q1_nbytes(shape)
    weights = decode_q1(payload[:base], shape)
    entries = payload[base + 4 :].view(_FLAT_ENTRY)
    weights.reshape(-1)[entries["index"]] = entries["value"]
    return weights


def decode_q1t(payload: Payload, shape: Shape) -> Weights:
    """0, +scale or -scale, then the overlay."""
    check_q1t(payload, shape)
    rows, groups = grouped_matrix(shape)
    tiles_end = rows * groups * _DIGIT_TILE.itemsize
    entries_at = tiles_end + 4 * (rows + 1)
    weights = _scaled_digits(payload[:tiles_end].view(_DIGIT_TILE)).reshape(shape)
    pointers = payload[tiles_end:entries_at].view("<u4").astype(np.int64)
    entries = payload[entries_at:].view(_ROW_ENTRY)
    row = np.repeat(np.arange(rows), np.diff(pointers))
    weights[row, entries["col"]] = entries["value"]
    return weights


def _scaled_digits(tiles: npt.NDArray[np.void]) -> Weights:
    weights = np.empty((tiles.size, GROUP), np.float32)
    for start in range(0, tiles.size, _BLOCK_TILES):
        block = tiles[start : start + _BLOCK_TILES]
        digits = np.take(_TERNARY, block["digits"], axis=0).reshape(block.size, -1)[:, :GROUP]
        scales, some = block["scale"].astype(np.float32), weights[start : start + _BLOCK_TILES]
        np.multiply(digits, scales[:, None], out=some)
        if not np.isfinite(scales).all():
            some[digits == 0] = 0  # digit 0 is 0 under any scale, and 0 * Inf is not
    return weights


def _read_u32(payload: Payload, offset_bytes: int, what: str) -> int:
    if payload.size < offset_bytes + 4:
        raise PayloadError(
            f"payload ends before {what}",
            offset_bytes=payload.size,
            expected=f"at least {offset_bytes + 4} bytes",
            got=payload.size,
        )
    return int.from_bytes(payload[offset_bytes : offset_bytes + 4].tobytes(), "little")
