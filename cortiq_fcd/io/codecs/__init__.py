"""Tensor encodings of CMF, one file a family; `CODECS` is the table.

To add one: its id in layout.DType, its functions in a file here (the docstring draws the bytes), a line in the table,
its tests. The table's functions ignore floating-point traps: payloads may hold any bits, NaN and Inf scales included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cortiq_fcd.io.codecs import plain, q1, q4, q8, reserved, tp, vbit
from cortiq_fcd.io.codecs.codec import Codec, EncodeError, Payload, PayloadError, Shape, Weights
from cortiq_fcd.io.layout import DType

__all__ = ["CODECS", "Codec", "EncodeError", "Payload", "PayloadError", "Shape", "Weights"]


def _quiet(decode: Callable[[Payload, Shape], Weights]) -> Callable[[Payload, Shape], Weights]:
    return np.errstate(all="ignore")(decode)


CODECS: dict[DType, Codec] = {
    codec.dtype: codec
    for codec in (
        Codec(DType.F32, plain.f32_nbytes, _quiet(plain.decode_f32), plain.encode_f32),
        Codec(DType.F16, plain.half_nbytes, _quiet(plain.decode_f16), plain.encode_f16),
        Codec(DType.BF16, plain.half_nbytes, _quiet(plain.decode_bf16), plain.encode_bf16),
        Codec(DType.Q8_ROW, q8.q8_row_nbytes, _quiet(q8.decode_q8_row), q8.encode_q8_row),
        Codec(DType.Q4_BLOCK, q4.q4_block_nbytes, _quiet(q4.decode_q4_block), q4.encode_q4_block),
        Codec(DType.MIX8_4, reserved.reserved_nbytes, reserved.decode_reserved, None),
        Codec(DType.U8, reserved.reserved_nbytes, reserved.decode_reserved, None),
        Codec(DType.Q4_COL, reserved.reserved_nbytes, reserved.decode_reserved, None),
        Codec(DType.VBIT, vbit.vbit_nbytes, _quiet(vbit.decode_vbit), None, vbit.check_vbit),
        Codec(DType.Q8_2F, q8.q8_2f_nbytes, _quiet(q8.decode_q8_2f), q8.encode_q8_2f),
        Codec(DType.VBIT_RO, vbit.vbit_ro_nbytes, _quiet(vbit.decode_vbit_ro), vbit.encode_vbit_ro, vbit.check_vbit_ro),
        Codec(DType.Q4_TILED, q4.q4_tiled_nbytes, _quiet(q4.decode_q4_tiled), q4.encode_q4_tiled),
        Codec(DType.Q1, q1.q1_nbytes, _quiet(q1.decode_q1), None),
        Codec(DType.Q1S, q1.q1s_nbytes, _quiet(q1.decode_q1s), None, q1.check_q1s),
        Codec(DType.Q1T, q1.q1t_nbytes, _quiet(q1.decode_q1t), None, q1.check_q1t),
        Codec(DType.Q4TP, tp.q4tp_nbytes, _quiet(tp.decode_q4tp), tp.encode_q4tp),
        Codec(DType.Q2TP, tp.q2tp_nbytes, _quiet(tp.decode_q2tp), None),
    )
}
