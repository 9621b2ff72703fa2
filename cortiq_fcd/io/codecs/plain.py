"""f32, f16, bf16: one little-endian float a weight.

f32   seeeeeeee mmmmmmm mmmmmmmm mmmmmmmm
f16   seeeeemm mmmmmmmm
bf16  seeeeeee emmmmmmm                     the upper half of an f32
"""

from __future__ import annotations

import numpy as np

from cortiq_fcd.io.codecs.codec import (
    F16_MAX,
    EncodeError,
    Payload,
    Shape,
    Weights,
    element_count,
    require_finite,
    require_size,
    row_blocks,
)


def f32_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """4 bytes a weight."""
    return 4 * element_count(shape)


def half_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """2 bytes a weight (f16 and bf16)."""
    return 2 * element_count(shape)


def decode_f32(payload: Payload, shape: Shape) -> Weights:
    """A copy of the floats."""
    require_size(payload, f32_nbytes(shape))
    return payload.view("<f4").astype(np.float32, copy=True).reshape(shape)


def decode_f16(payload: Payload, shape: Shape) -> Weights:
    """Exact: every f16 is an f32."""
    require_size(payload, half_nbytes(shape))
    return payload.view("<f2").astype(np.float32).reshape(shape)


def decode_bf16(payload: Payload, shape: Shape) -> Weights:
    """Exact: the bits become the upper half of the f32."""
    require_size(payload, half_nbytes(shape))
    weights: Weights = np.left_shift(payload.view("<u2"), 16, dtype=np.uint32).view(np.float32)
    return weights.reshape(shape)


def encode_f32(weights: Weights) -> Payload:
    """The floats as they are; EncodeError for NaN and Inf."""
    require_finite(weights)
    return np.ascontiguousarray(weights, "<f4").reshape(-1).view(np.uint8)


def encode_f16(weights: Weights) -> Payload:
    """Rounded to nearest even; EncodeError for NaN, Inf and what would round to Inf."""
    require_finite(weights)
    with np.errstate(over="ignore", under="ignore"):
        halves = np.ascontiguousarray(weights.astype("<f2").reshape(-1))
    _refuse_overflow(np.isinf(halves), weights, "f16", F16_MAX)
    return halves.view(np.uint8)


def encode_bf16(weights: Weights) -> Payload:
    """Rounded to nearest even; EncodeError for NaN, Inf and what would round to Inf."""
    require_finite(weights)
    bits = np.ascontiguousarray(weights, np.float32).reshape(-1).view(np.uint32)
    halves = np.empty(bits.size, "<u2")
    for block in row_blocks(bits.size, 1):
        halves[block] = (bits[block] + (0x7FFF + ((bits[block] >> 16) & 1))) >> 16
    _refuse_overflow((halves & 0x7FFF) == 0x7F80, weights, "bf16", 3.3895314e38)
    return halves.view(np.uint8)


def _refuse_overflow(overflown: np.ndarray, weights: Weights, name: str, largest: float) -> None:
    if overflown.any():
        where = int(np.flatnonzero(overflown)[0])
        raise EncodeError(
            f"{weights.reshape(-1)[where]:g} at flat index {where} does not fit {name} (largest {largest:g})"
        )
