"""mix8_4, u8, q4_col: reserved ids. Their bytes are kept, hashed and copied, but are no weights."""

from __future__ import annotations

from typing import NoReturn

from cortiq_fcd.io.codecs.codec import Payload, PayloadError, Shape, require_payload


def reserved_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """Whatever length the payload has: the shape implies none."""
    return require_payload(payload).size


def decode_reserved(payload: Payload, shape: Shape) -> NoReturn:
    """Always PayloadError."""
    raise PayloadError("this dtype is reserved and can't be decoded to weights")
