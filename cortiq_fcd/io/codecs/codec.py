"""What a codec is, and the two ways one fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.layout import GROUP, DType

Shape = tuple[int, ...]
Payload = npt.NDArray[np.uint8]  # [nbytes], C-contiguous, any alignment
Weights = npt.NDArray[np.float32]

F16_MAX = 65504.0
_BLOCK_WEIGHTS = 1 << 20  # encoded at a time: the many temporaries of an encoder stay small however large the tensor


class PayloadError(Exception):
    """A payload or a shape that its dtype does not allow; `offset_bytes` counts from the payload's start."""

    def __init__(
        self, what: str, *, offset_bytes: int | None = None, expected: object = None, got: object = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.offset_bytes = offset_bytes
        self.expected = expected
        self.got = got


class EncodeError(Exception):
    """Weights that a dtype can't hold. `nonfinite` tells NaN and Inf from finite values that are out of range."""

    def __init__(self, what: str, *, nonfinite: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.nonfinite = nonfinite


class SizeRule(Protocol):
    """Bytes that a shape implies. Dtypes whose payload has its own header (vbit, vbit_ro, q1s, q1t) read it, so they
    need `payload`; for the others it is not looked at. PayloadError when the dtype can't hold the shape.
    """

    def __call__(self, shape: Shape, payload: Payload | None = None) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Codec:
    """One encoding: `decode(payload, shape)` gives a fresh f32 array of that shape, `encode(weights)` the payload.

    `encode` is None where nothing here writes the dtype. `check(payload, shape)`, where there is one, bounds-checks the
    indices inside a payload without decoding it. decode and check raise PayloadError, encode raises EncodeError.
    """

    dtype: DType
    nbytes: SizeRule
    decode: Callable[[Payload, Shape], Weights]
    encode: Callable[[Weights], Payload] | None
    check: Callable[[Payload, Shape], None] | None = None


def require_size(payload: Payload, expected_bytes: int) -> None:
    """PayloadError unless the payload has exactly this many bytes."""
    if payload.size != expected_bytes:
        raise PayloadError("wrong payload length", offset_bytes=0, expected=f"{expected_bytes} bytes", got=payload.size)


def require_payload(payload: Payload | None) -> Payload:
    """The payload of a dtype whose size can't be told without one; ValueError (a bug of the caller) when it is None."""
    if payload is None:
        raise ValueError("the size of this dtype depends on its payload")
    return payload


def matrix(shape: Shape) -> tuple[int, int]:
    """(rows, cols); PayloadError unless the shape is 2-D."""
    if len(shape) != 2:
        raise PayloadError("this dtype holds matrices only", expected="2 dimensions", got=list(shape))
    return shape[0], shape[1]


def grouped_matrix(shape: Shape) -> tuple[int, int]:
    """(rows, groups of 32 a row); PayloadError unless the shape is 2-D with columns in whole groups."""
    rows, cols = matrix(shape)
    if cols % GROUP:
        raise PayloadError("this dtype needs whole groups of columns", expected=f"a multiple of {GROUP}", got=cols)
    return rows, cols // GROUP


def element_count(shape: Shape) -> int:
    """The product of the shape, 1 for a scalar."""
    return math.prod(shape)


def require_finite(weights: Weights) -> None:
    """EncodeError if there is a NaN or an infinity."""
    if not np.isfinite(weights).all():
        where = int(np.flatnonzero(~np.isfinite(weights.reshape(-1)))[0])
        raise EncodeError(f"{weights.reshape(-1)[where]} at flat index {where}", nonfinite=True)


def row_blocks(rows: int, cols: int) -> Iterator[slice]:
    """Consecutive slices of rows, each of about a million weights."""
    step = max(1, _BLOCK_WEIGHTS // max(1, cols))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def f16_scales(scales: Weights) -> npt.NDArray[np.float16]:
    """Scales as they are stored; EncodeError if one overflows. Quantise against what this returns."""
    if scales.size and float(np.max(scales)) >= F16_MAX + 16:  # half a unit above the largest rounds to infinity
        raise EncodeError(f"a scale of {float(np.max(scales)):g} does not fit f16 (largest {F16_MAX:g})")
    with np.errstate(under="ignore"):
        return scales.astype("<f2")


def quantise(weights: Weights, scales: Weights, low: int, high: int) -> npt.NDArray[np.int8]:
    """round(weights / scales), ties to even, clipped to low .. high; 0 where the scale is 0. They broadcast."""
    with np.errstate(under="ignore", over="ignore"):
        ratio = np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)
    q: npt.NDArray[np.int8] = np.clip(np.rint(ratio), low, high).astype(np.int8)
    return q
