"""q4tp and q2tp: 4 or 2 bits a weight; the scale of each group of 32 is a rung of its row's geometric ladder.

    rows*gpr*16 (q4tp) or *8 (q2tp) bytes of codes | rows x (f16 lo, f16 step) | rows x ceil(gpr*5/8) bytes of rungs

gpr = cols / 32; 5-bit rungs, lowest bit first, each row on a new byte; 2-D, cols % 32 == 0.

    ladder   t[0] = 2^lo, t[c] = t[c-1] * 2^step in f32, both powers computed in f64 and rounded once
    q4tp     w = (nibble - 8) * t[rung]                         nibbles as q4_block
    q2tp     w = (code - 1.5) * t'[rung]                        four codes a byte, lowest first; t'[0]=0, t'[c]=t[c-1]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs.codec import (
    EncodeError,
    Payload,
    Shape,
    Weights,
    grouped_matrix,
    quantise,
    require_finite,
    require_size,
    row_blocks,
)
from cortiq_fcd.io.codecs.q4 import pack_nibbles, scaled_nibbles
from cortiq_fcd.io.layout import GROUP

RUNGS = 32
_NIBBLE_BYTES, _CRUMB_BYTES = GROUP // 2, GROUP // 4
_BLOCK_GROUPS = 4096

_BYTE = np.arange(256)
# The four weights of a crumb byte in units of the scale, moved as two 64-bit words.
_CRUMBS = np.stack([(_BYTE >> shift & 3) - 1.5 for shift in (0, 2, 4, 6)], axis=1).astype(np.float32)

Rungs = npt.NDArray[np.intp]


def q4tp_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """16 bytes a group, 4 a row, 5 bits a group rounded up by row."""
    return _nbytes(shape, _NIBBLE_BYTES)


def q2tp_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """8 bytes a group, 4 a row, 5 bits a group rounded up by row."""
    return _nbytes(shape, _CRUMB_BYTES)


def decode_q4tp(payload: Payload, shape: Shape) -> Weights:
    """(nibble - 8) * ladder rung."""
    require_size(payload, q4tp_nbytes(shape))
    rows, groups = grouped_matrix(shape)
    codes_end = rows * groups * _NIBBLE_BYTES
    ladder, rungs = _read_ladders(payload[codes_end:], rows, groups)
    scales = np.take_along_axis(ladder, rungs, axis=1).reshape(-1)
    return scaled_nibbles(payload[:codes_end].reshape(-1, _NIBBLE_BYTES), scales).reshape(shape)


def decode_q2tp(payload: Payload, shape: Shape) -> Weights:
    """(code - 1.5) * ladder rung, where rung 0 is zero."""
    require_size(payload, q2tp_nbytes(shape))
    rows, groups = grouped_matrix(shape)
    codes_end = rows * groups * _CRUMB_BYTES
    ladder, rungs = _read_ladders(payload[codes_end:], rows, groups)
    shifted = np.concatenate([np.zeros((rows, 1), np.float32), ladder[:, :-1]], axis=1)
    scales = np.take_along_axis(shifted, rungs, axis=1).reshape(-1)
    codes = payload[:codes_end].reshape(-1, _CRUMB_BYTES)
    weights = np.empty((rows * groups, GROUP), np.float32)
    for start in range(0, scales.size, _BLOCK_GROUPS):
        block = slice(start, start + _BLOCK_GROUPS)
        crumbs = np.take(_CRUMBS, codes[block], axis=0).reshape(-1, GROUP)
        np.multiply(crumbs, scales[block, None], out=weights[block])
    return weights.reshape(shape)


def encode_q4tp(weights: Weights) -> Payload:
    """A ladder from the smallest to the largest group scale (absmax / 7) of each row; each group takes the rung, among
    those around its own scale, that leaves the smallest squared error. EncodeError for NaN, Inf and scales above f16.
    """
    rows, groups = grouped_matrix(weights.shape)
    require_finite(weights)
    payload = np.empty(q4tp_nbytes(weights.shape), np.uint8)
    params_at = rows * groups * _NIBBLE_BYTES
    nibbles = payload[:params_at].reshape(rows, groups, _NIBBLE_BYTES)
    params = payload[params_at : params_at + 4 * rows].view("<f2").reshape(rows, 2)
    packed = payload[params_at + 4 * rows :].reshape(rows, _rung_bytes(groups))
    for block in row_blocks(rows, groups * GROUP):
        grouped = np.asarray(weights[block], np.float32).reshape(block.stop - block.start, groups, GROUP)
        wanted = np.abs(grouped).max(axis=2, initial=0.0) / np.float32(7)
        params[block, 0], params[block, 1] = _fit_ladders(wanted)
        ladder = ladders(params[block, 0], params[block, 1])
        if not np.isfinite(ladder).all():
            raise EncodeError("the scales of a row do not fit its ladder")
        rungs, nibbles[block] = _best_rungs(grouped, wanted, ladder)
        packed[block] = pack_rungs(rungs)
    return payload


def ladders(lo: npt.NDArray[np.float16], step: npt.NDArray[np.float16]) -> Weights:
    """t[0] = 2^lo, t[c] = t[c-1] * 2^step in f32: [rows] -> [rows, 32]."""
    ladder = np.empty((lo.size, RUNGS), np.float32)
    ladder[:, 0] = np.exp2(lo.astype(np.float64))
    factor = np.exp2(step.astype(np.float64)).astype(np.float32)
    for c in range(1, RUNGS):
        np.multiply(ladder[:, c - 1], factor, out=ladder[:, c])
    return ladder


def pack_rungs(rungs: Rungs) -> Payload:
    """5-bit rungs [rows, groups] as bytes [rows, ceil(groups*5/8)], lowest bit first."""
    bits = (rungs[:, :, None] >> np.arange(5) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(rungs.shape[0], rungs.shape[1] * 5), axis=1, bitorder="little")


def _nbytes(shape: Shape, code_bytes: int) -> int:
    rows, groups = grouped_matrix(shape)
    return rows * groups * code_bytes + 4 * rows + rows * _rung_bytes(groups)


def _rung_bytes(groups: int) -> int:
    return -(-groups * 5 // 8)


def _read_ladders(tail: Payload, rows: int, groups: int) -> tuple[Weights, Rungs]:
    """Ladders [rows, 32] and rungs [rows, groups] from what follows the codes."""
    params = tail[: 4 * rows].view("<f2").reshape(rows, 2)
    packed = tail[4 * rows :].reshape(rows, _rung_bytes(groups))
    bits = np.unpackbits(packed, axis=1, count=groups * 5, bitorder="little").reshape(rows, groups, 5)
    rungs = (bits.astype(np.intp) << np.arange(5)).sum(axis=2)
    return ladders(params[:, 0], params[:, 1]), rungs


def _fit_ladders(wanted: Weights) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """lo and step [rows] that span the non-zero scales [rows, groups] of each row, rounded so as to reach the top."""
    some = wanted > 0
    logs = np.log2(np.where(some, wanted, 1.0), dtype=np.float64)
    low = np.where(some, logs, np.inf).min(axis=1, initial=np.inf)
    high = np.where(some, logs, -np.inf).max(axis=1, initial=-np.inf)
    low, high = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)
    lo = _f16_at_most(low)
    step = -_f16_at_most(-(high - lo.astype(np.float64)) / (RUNGS - 1))
    return lo, step


def _f16_at_most(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float16]:
    """The largest f16 that is not above each value."""
    halves = values.astype("<f2")
    return np.where(halves > values, np.nextafter(halves, np.float16(-np.inf)), halves)


def _best_rungs(grouped: Weights, wanted: Weights, ladder: Weights) -> tuple[Rungs, Payload]:
    """Rungs [rows, groups] and nibble bytes [rows, groups, 16]."""
    above = (ladder[:, None, :] < wanted[:, :, None]).sum(axis=2)  # the first rung that does not clip
    best_error = np.full(wanted.shape, np.inf)
    best_rung = np.zeros(wanted.shape, np.intp)
    best_q = np.zeros(grouped.shape, np.int8)
    for offset in (0, -1, -2, 1):
        rung = np.clip(above + offset, 0, RUNGS - 1)
        scale = np.take_along_axis(ladder, rung, axis=1)[:, :, None]
        q = quantise(grouped, scale, -8, 7)
        error = np.square(grouped - q * scale, dtype=np.float64).sum(axis=2)
        better = error < best_error
        best_error[better], best_rung[better], best_q[better] = error[better], rung[better], q[better]
    return best_rung, pack_nibbles(best_q.reshape(-1, GROUP)).reshape(*wanted.shape, _NIBBLE_BYTES)
