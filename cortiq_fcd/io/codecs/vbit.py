"""vbit and vbit_ro: 3, 4, 5, 6 or 8 bits a weight, a width for each row, an f16 scale for each group of 32.

    vbit     rows u8 widths | rows*cols/32 f16 |                       packed rows
    vbit_ro  rows u8 widths | rows*cols/32 f16 | u32 offsets[rows+1] | packed rows

A packed row holds its values u highest bit first and starts on a byte: w = (u - (2^(b-1) - 1)) * scale. offsets count
from the packed area, start at 0 and say again what the widths imply. 2-D, cols % 32 == 0, so a row fills its bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs.codec import (
    F16_MAX,
    EncodeError,
    Payload,
    PayloadError,
    Shape,
    Weights,
    f16_scales,
    grouped_matrix,
    quantise,
    require_finite,
    require_payload,
    require_size,
    row_blocks,
)
from cortiq_fcd.io.layout import GROUP

WIDTHS = (3, 4, 5, 6, 8)
_BLOCK_WEIGHTS = 1 << 18  # decoded at a time: bounds the scratch, and keeps it in the cache
_ERROR = 0.03  # rms error that the encoder lets a row have, in units of the whole tensor's rms

Widths = npt.NDArray[np.uint8]


def vbit_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """Widths, scales, and the packed bits that the widths imply."""
    rows, groups = grouped_matrix(shape)
    widths = _read_widths(require_payload(payload), rows)
    return rows + 2 * rows * groups + int(_row_bytes(widths, groups).sum())


def vbit_ro_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """As vbit, and 4 bytes for each of rows + 1 offsets."""
    return vbit_nbytes(shape, payload) + 4 * (shape[0] + 1)


def vbit_ro_bounds(shape: Shape) -> tuple[int, int]:
    """The least and the most bytes that weights of this shape can take: every row at 3 bits, or at 8."""
    rows, groups = grouped_matrix(shape)
    least, most = (
        rows + 2 * rows * groups + 4 * (rows + 1) + rows * groups * GROUP // 8 * width
        for width in (WIDTHS[0], WIDTHS[-1])
    )
    return least, most


def check_vbit(payload: Payload, shape: Shape) -> None:
    """Widths and length."""
    require_size(payload, vbit_nbytes(shape, payload))


def check_vbit_ro(payload: Payload, shape: Shape) -> None:
    """Widths, length, and offsets equal to what the widths imply."""
    require_size(payload, vbit_ro_nbytes(shape, payload))
    rows, groups = grouped_matrix(shape)
    offsets_at = rows + 2 * rows * groups
    offsets = payload[offsets_at : offsets_at + 4 * (rows + 1)].view("<u4")
    implied = _row_starts(payload[:rows], groups)
    wrong = np.flatnonzero(offsets != implied)
    if wrong.size:
        row = int(wrong[0])
        raise PayloadError(
            f"offset of row {row}",
            offset_bytes=offsets_at + 4 * row,
            expected=int(implied[row]),
            got=int(offsets[row]),
        )


def decode_vbit(payload: Payload, shape: Shape) -> Weights:
    """(u - (2^(b-1) - 1)) * scale."""
    check_vbit(payload, shape)
    return _decode_rows(payload, shape, packed_at=shape[0] + 2 * shape[0] * (shape[1] // GROUP))


def decode_vbit_ro(payload: Payload, shape: Shape) -> Weights:
    """As vbit."""
    check_vbit_ro(payload, shape)
    return _decode_rows(payload, shape, packed_at=shape[0] + 2 * shape[0] * (shape[1] // GROUP) + 4 * (shape[0] + 1))


def encode_vbit_ro(weights: Weights) -> Payload:
    """Each row at the narrowest width that keeps its rms error below 3 % of the tensor's rms, 8 bits if none does.

    One bound in absolute terms for all rows: bits go to the rows that carry the energy, as in reverse water-filling.

    Scale absmax / (2^(b-1) - 1) by group, rounded to f16 before quantising. EncodeError for NaN, Inf, scales above f16.
    """
    rows, groups = grouped_matrix(weights.shape)
    require_finite(weights)
    widths = np.zeros(rows, np.uint8)
    scales = np.zeros((rows, groups), "<f2")
    packed: list[bytes] = []
    blocks = list(row_blocks(rows, groups * GROUP))
    energy = sum(float(np.square(weights[block], dtype=np.float64).sum()) for block in blocks)
    allowed = _ERROR * (energy / max(1, weights.size)) ** 0.5
    for block in blocks:
        grouped = np.asarray(weights[block], np.float32).reshape(block.stop - block.start, groups, GROUP)
        packed += _encode_rows(grouped, allowed, widths[block], scales[block])
    starts = _row_starts(widths, groups)
    if int(starts[-1]) > 0xFFFFFFFF:
        raise EncodeError("the packed rows pass 4 GiB, which u32 offsets can't reach")
    parts = [widths.tobytes(), scales.tobytes(), starts.astype("<u4").tobytes(), *packed]
    return np.frombuffer(b"".join(parts), np.uint8)


def _encode_rows(grouped: Weights, allowed: float, widths: Widths, scales: npt.NDArray[np.float16]) -> list[bytes]:
    """Fill widths [rows] (0 = still open) and scales [rows, groups]; the packed bytes of each row."""
    packed = [b""] * widths.size
    for width in WIDTHS:
        todo = np.flatnonzero(widths == 0)
        row_scales, q = _quantise_rows(grouped[todo], width)
        good = (_row_errors(grouped[todo], row_scales, q) <= allowed) | (width == WIDTHS[-1])
        kept = todo[good]
        widths[kept], scales[kept] = width, row_scales[good]
        for row, bits in zip(kept, _pack_rows(q[good], width), strict=True):
            packed[row] = bits.tobytes()
    return packed


def _read_widths(payload: Payload, rows: int) -> Widths:
    if payload.size < rows:
        raise PayloadError(
            "payload ends inside the row widths", offset_bytes=payload.size, expected=f"{rows} widths", got=payload.size
        )
    widths = payload[:rows]
    wrong = np.flatnonzero(~np.isin(widths, WIDTHS))
    if wrong.size:
        row = int(wrong[0])
        raise PayloadError(
            f"width of row {row}", offset_bytes=row, expected="3, 4, 5, 6 or 8 bits", got=int(widths[row])
        )
    return widths


def _row_bytes(widths: Widths, groups: int) -> npt.NDArray[np.int64]:
    return widths.astype(np.int64) * (groups * GROUP // 8)


def _row_starts(widths: Widths, groups: int) -> npt.NDArray[np.int64]:
    """Where each packed row starts, and where the last one ends: [rows + 1]."""
    return np.concatenate([[0], np.cumsum(_row_bytes(widths, groups))])


def _decode_rows(payload: Payload, shape: Shape, packed_at: int) -> Weights:
    rows, groups = grouped_matrix(shape)
    widths = payload[:rows]
    scales = payload[rows : rows + 2 * rows * groups].view("<f2").reshape(rows, groups)
    starts = packed_at + _row_starts(widths, groups)[:-1]
    weights = np.empty((rows, groups, GROUP), np.float32)
    rows_at_once = max(1, _BLOCK_WEIGHTS // max(1, groups * GROUP))
    for width in WIDTHS:
        of_width = np.flatnonzero(widths == width)
        for first in range(0, of_width.size, rows_at_once):
            some = of_width[first : first + rows_at_once]
            bits = payload[starts[some][:, None] + np.arange(width * groups * GROUP // 8)]
            values = _unpack(bits.reshape(-1, width), width).reshape(some.size, groups, GROUP)
            weights[some] = values * scales[some].astype(np.float32)[:, :, None]
    return weights.reshape(shape)


def _unpack(octets: Payload, width: int) -> npt.NDArray[np.int16]:
    """u - (2^(b-1) - 1) from runs of 8 weights in `width` bytes each: [runs, width] -> [runs, 8]."""
    word = np.zeros(octets.shape[0], np.uint64)
    for k in range(width):
        word = word << np.uint64(8) | octets[:, k]
    values = np.empty((octets.shape[0], 8), np.int16)
    mask = np.uint64((1 << width) - 1)
    for k in range(8):
        values[:, k] = word >> np.uint64(width * (7 - k)) & mask
    values -= np.int16((1 << (width - 1)) - 1)
    return values


def _pack_rows(q: npt.NDArray[np.int16], width: int) -> Payload:
    """The packed bytes [rows, bytes] of signed values [rows, groups, 32]; the inverse of `_unpack`."""
    u = (
        (q.astype(np.int64) + ((1 << (width - 1)) - 1))
        .astype(np.uint64)
        .reshape(q.shape[0], q.shape[1] * GROUP // 8, 8)
    )
    word = np.zeros(u.shape[:2], np.uint64)
    for k in range(8):
        word = word << np.uint64(width) | u[:, :, k]
    shifts = np.arange(8 * (width - 1), -1, -8, dtype=np.uint64)
    octets: Payload = (word[:, :, None] >> shifts & np.uint64(255)).astype(np.uint8)
    return octets.reshape(q.shape[0], u.shape[1] * width)


def _quantise_rows(grouped: Weights, width: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int16]]:
    """Scales [rows, groups] and signed values [rows, groups, 32] at one width; EncodeError at the widest only."""
    top = (1 << (width - 1)) - 1
    wanted = np.abs(grouped).max(axis=2, initial=0.0) / np.float32(top)
    scales = f16_scales(wanted if width == WIDTHS[-1] else np.minimum(wanted, np.float32(F16_MAX)))
    return scales, quantise(grouped, scales.astype(np.float32)[:, :, None], -top, top).astype(np.int16)


def _row_errors(grouped: Weights, scales: npt.NDArray[np.float16], q: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """rms error of each row."""
    off = grouped - q * scales.astype(np.float32)[:, :, None]
    error: npt.NDArray[np.float64] = np.sqrt(
        np.square(off, dtype=np.float64).sum(axis=(1, 2)) / max(1, off.shape[1] * GROUP)
    )
    return error
