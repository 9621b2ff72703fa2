"""Which dtype a tensor gets.

    vectors, norms, convolutions    the floats of the source: f32 stays f32 (f64 becomes it), 16 bits stay as they are
    matrices                        --quant; q8_row where the dtype can't hold the width
    embedding, head                 --quant, but never below 8 bits: a token's row is all that is known of it, and the
                                    head's error goes straight into the logits
    a and b of GatedDeltaNet        as embedding and head: a few rows that steer how long a layer remembers

With f32 everything is f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.io.codecs import CODECS, PayloadError
from cortiq_fcd.io.codecs.codec import grouped_matrix
from cortiq_fcd.io.hf.names import Placed
from cortiq_fcd.io.layout import DType

QUANTS: Mapping[str, DType] = {
    **{
        dtype.label: dtype
        for dtype in (
            DType.F32,
            DType.F16,
            DType.BF16,
            DType.Q8_ROW,
            DType.Q8_2F,
            DType.Q4_BLOCK,
            DType.Q4_TILED,
            DType.Q4TP,
        )
    },
    "vbit": DType.VBIT_RO,
}
_AT_LEAST_8_BITS = frozenset({DType.F32, DType.F16, DType.BF16, DType.Q8_ROW, DType.Q8_2F})
_OWN_FLOATS = {"F16": DType.F16, "BF16": DType.BF16}


@dataclass(frozen=True)
class Chosen:
    """A tensor's dtype; `instead_of` is set where the one asked for can't hold its shape, and `why` tells."""

    dtype: DType
    instead_of: DType | None = None
    why: str = ""


def parse_quant(text: str) -> DType:
    """The dtype of a --quant; ConfigError for another word."""
    if text not in QUANTS:
        raise ConfigError(f"--quant {text!r} is not known", hint=f"one of {', '.join(QUANTS)}")
    return QUANTS[text]


def choose(tensor: Placed, quant: DType) -> Chosen:
    """The dtype of one tensor when `quant` was asked for."""
    if tensor.role == "vector" or len(tensor.shape) != 2:
        return Chosen(DType.F32 if quant == DType.F32 else _OWN_FLOATS.get(tensor.stored.dtype, DType.F32))
    if tensor.role in ("embedding", "gate") and quant not in _AT_LEAST_8_BITS:
        return Chosen(DType.Q8_ROW)
    try:
        if quant == DType.VBIT_RO:
            grouped_matrix(tensor.shape)
        else:
            CODECS[quant].nbytes(tensor.shape)
    except PayloadError as error:
        return Chosen(DType.Q8_ROW, quant, f"{error.what} ({error.expected}, got {error.got})")
    return Chosen(quant)
