"""Hand-written bytes, random bytes against plain Python, round trips, wrong lengths, hostile indices, refusals."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_fcd.io.codecs import CODECS, EncodeError, PayloadError
from cortiq_fcd.io.layout import DType
from tests.io import plain_codecs
from tests.io.hand_rolled import ANY_MATRIX, ANY_SHAPE, DECODABLE, IDS, RESERVED, payload_of

ENCODABLE = ("f32", "f16", "bf16", "q8_row", "q8_2f", "q4_block", "q4_tiled", "vbit_ro", "q4tp")
ONE, HALF, TWO = struct.pack("<e", 1), struct.pack("<e", 0.5), struct.pack("<e", 2)


def codec(name: str):
    return CODECS[DType(IDS[name])]


def as_payload(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def decode(name: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    return codec(name).decode(as_payload(data), tuple(shape))


def same_floats(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bit for bit, except the sign of zero and the payload of NaN."""
    return got.shape == want.shape and np.array_equal(got, want, equal_nan=True)


def test_the_table_covers_the_enum() -> None:
    assert set(CODECS) == set(DType)
    assert all(codec.dtype is dtype for dtype, codec in CODECS.items())
    assert {dtype.label: int(dtype) for dtype in DType} == IDS
    assert {dtype.label for dtype, codec in CODECS.items() if codec.encode} == set(ENCODABLE)


NIBBLES = bytes([0x98, 0x07]) + bytes([0x88]) * 14  # 8 -> 0, 9 -> 1, 7 -> -1, 0 -> -8
HAND_WRITTEN = [
    ("f32", struct.pack("<2f", 1.5, -0.25), (2,), [1.5, -0.25]),
    ("f32", struct.pack("<f", 3), (), [3]),
    ("f16", struct.pack("<2e", 1.5, 2.0**-24), (2, 1), [1.5, 2.0**-24]),
    ("bf16", bytes([0xC0, 0x3F, 0x01, 0x00]), (2,), [1.5, 2.0**-133]),
    ("q8_row", bytes([127, 0x80, 1, 0xFF]) + ONE + HALF, (2, 2), [127, -128, 0.5, -0.5]),
    ("q8_2f", bytes([2, 4, 6, 8]) + ONE + HALF + TWO + ONE, (2, 2), [4, 4, 6, 4]),
    ("q4_block", NIBBLES + HALF, (4,), [0, 0.5, -0.5, -4]),
    ("q4_block", NIBBLES * 2 + HALF + TWO, (33,), [0, 0.5, -0.5, -4] + [0] * 28 + [0]),
    ("q4_tiled", TWO + NIBBLES, (1, 32), [0, 2, -2, -16] + [0] * 28),
    ("q1", TWO + bytes([0b101, 0, 0, 0x80]), (1, 32), [2, -2, 2] + [-2] * 28 + [2]),
    ("q1s", TWO + bytes(4) + struct.pack("<IIe", 1, 31, 7), (1, 32), [-2] * 31 + [7]),
    ("q1t", TWO + bytes([1 + 2 * 3 + 0 * 9 + 1 * 27, 0, 0, 0, 0, 0, 2 * 3]) + struct.pack("<IIHe", 0, 1, 2, 9), (1, 32),
     [2, -2, 9, 2] + [0] * 27 + [-2]),
    ("vbit", bytes([3]) + TWO + bytes([0b000_001_01, 0b1_100_101_1, 0b10_111_011]) + bytes([0b011_011_01, 0b1_011_011_0,
     0b11_011_011]) * 3, (1, 32), [-6, -4, 0, 2, 4, 6, 8, 0] + [0] * 24),
    ("vbit_ro", bytes([8]) + HALF + struct.pack("<II", 0, 32) + bytes([127, 0, 255]) + bytes([127]) * 29, (1, 32),
     [0, -63.5, 64] + [0] * 29),
    ("q4tp", NIBBLES + struct.pack("<ee", 1, 2) + bytes([2]), (1, 32), [0, 32, -32, -256] + [0] * 28),
    ("q2tp", bytes([0b11_10_01_00]) * 8 + struct.pack("<ee", 1, 2) + bytes([2]), (1, 32), [-12, -4, 4, 12] * 8),
    ("q2tp", bytes([0b11_10_01_00]) * 8 + struct.pack("<ee", 1, 2) + bytes([0]), (1, 32), [0] * 32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "shape", "expected"), HAND_WRITTEN)
def test_hand_written_bytes(name: str, data: bytes, shape: tuple[int, ...], expected: list[float]) -> None:
    assert codec(name).nbytes(shape, as_payload(data)) == len(data)
    for got in (decode(name, data, shape), plain_codecs.decode(name, data, shape)):
        assert same_floats(got, np.array(expected, np.float32).reshape(shape))


def shapes_for(name: str) -> list[tuple[int, ...]]:
    grouped = [(1, 32), (3, 64), (7, 352), (2, 0), (0, 32), (5, 32 * 11)]
    matrices = [(1, 1), (5, 7), (2, 33), (11, 13), (0, 4), (4, 0)]
    others = [(), (1,), (17,), (65,), (2, 3, 5), (1, 2, 1, 2, 1, 7), (0,)]
    return grouped + matrices * (name in ANY_MATRIX) + others * (name in ANY_SHAPE)


CASES = [(name, shape) for name in DECODABLE for shape in shapes_for(name)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_random_bytes_decode_as_plain_python_does(name: str, shape: tuple[int, ...]) -> None:
    for seed in range(3):
        data = payload_of(name, shape, np.random.default_rng([seed, math.prod(shape)]))
        assert codec(name).nbytes(shape, as_payload(data)) == len(data)
        got = decode(name, data, shape)
        assert got.dtype == np.float32
        assert got.flags.writeable
        assert same_floats(got, plain_codecs.decode(name, data, shape))


@pytest.mark.parametrize("name", DECODABLE)
def test_more_rows_than_one_block_holds(name: str) -> None:
    """Blocked decoders (4096 groups, 2^18 weights) give the same where a block ends inside the tensor."""
    small = payload_of(name, (3, 64), np.random.default_rng(0))
    rows, cols = 300, 32 * 31
    data = payload_of(name, (rows, cols), np.random.default_rng(1))
    weights = decode(name, data, (rows, cols))
    picked = [0, 131, 132, 133, 299]
    assert same_floats(weights[picked], plain_codecs.decode(name, data, (rows, cols))[picked])
    decode(name, small, (3, 64))
    assert same_floats(decode(name, data, (rows, cols)), weights)  # no scratch is shared between calls


@pytest.mark.parametrize("name", DECODABLE)
def test_decoding_copies_and_accepts_unaligned_memory(name: str) -> None:
    data = payload_of(name, (3, 64), np.random.default_rng(1))
    memory = np.frombuffer(bytearray(b"?" + data), np.uint8)
    got = codec(name).decode(memory[1:], (3, 64))
    kept = got.copy()
    assert not np.shares_memory(got, memory)
    memory[:] = 0
    assert same_floats(got, kept)


@pytest.mark.parametrize("name", DECODABLE)
def test_every_truncation_and_extension_is_refused(name: str) -> None:
    data = payload_of(name, (3, 64), np.random.default_rng(2))
    for wrong in [*(data[:cut] for cut in range(len(data))), data + b"\0", data + data]:
        with pytest.raises(PayloadError):
            decode(name, wrong, (3, 64))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DECODABLE), st.binary(max_size=400))
def test_any_bytes_decode_or_are_refused(name: str, data: bytes) -> None:
    offset = 0
    try:
        shape = decode(name, data, (2, 32)).shape
    except PayloadError as error:
        shape, offset = (2, 32), error.offset_bytes or 0
    assert shape == (2, 32)
    assert 0 <= offset <= len(data)


@pytest.mark.parametrize("name", [n for n in DECODABLE if n not in ANY_SHAPE])
@pytest.mark.parametrize("shape", [(), (64,), (2, 2, 32), (2, 33)])
def test_shapes_that_a_dtype_cannot_hold(name: str, shape: tuple[int, ...]) -> None:
    if name in ANY_MATRIX and len(shape) == 2:
        return
    with pytest.raises(PayloadError, match="dtype"):
        codec(name).nbytes(shape, as_payload(bytes(1000)))


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_dtypes_are_bytes_of_any_length_and_no_weights(name: str) -> None:
    assert codec(name).nbytes((7,), as_payload(bytes(3))) == 3
    with pytest.raises(PayloadError, match="reserved"):
        decode(name, bytes(7), (7,))
    with pytest.raises(ValueError, match="payload"):
        codec(name).nbytes((7,))


HOSTILE = [
    ("q1s", bytes(6) + struct.pack("<IIe", 1, 32, 1), 10, "index outside"),
    ("q1s", bytes(6) + struct.pack("<IIe", 1, 0xFFFFFFFF, 1), 10, "index outside"),
    ("q1s", bytes(6) + struct.pack("<I", 0xFFFFFFFF), 0, "length"),
    ("q1s", bytes(6), 6, "ends before"),
    ("q1t", bytes(9) + struct.pack("<IIHe", 0, 1, 32, 1), 17, "column outside"),
    ("q1t", bytes(9) + struct.pack("<IIHe", 1, 1, 0, 1), 9, "first row pointer"),
    ("q1t", bytes(9) + struct.pack("<II", 0, 0xFFFFFFFF), 0, "length"),
    ("vbit", bytes([7, 0, 0]), 0, "width of row 0"),
    ("vbit", bytes([0, 0, 0]), 0, "width of row 0"),
    ("vbit_ro", bytes([3, 0, 0]) + struct.pack("<II", 1, 12) + bytes(12), 3, "offset of row 0"),
    ("vbit_ro", bytes([3, 0, 0]) + struct.pack("<II", 0, 13) + bytes(12), 7, "offset of row 1"),
    ("vbit_ro", bytes([3, 0, 0]) + struct.pack("<II", 0, 0xFFFFFFFF) + bytes(12), 7, "offset of row 1"),
]


@pytest.mark.parametrize(("name", "data", "offset", "message"), HOSTILE)
def test_hostile_indices(name: str, data: bytes, offset: int, message: str) -> None:
    with pytest.raises(PayloadError, match=message) as caught:
        decode(name, data, (1, 32))
    assert caught.value.offset_bytes == offset


def test_row_pointers_that_fall() -> None:
    data = bytes(27) + struct.pack("<4I", 0, 2, 1, 2) + bytes(8)
    with pytest.raises(PayloadError, match="below the one before") as caught:
        decode("q1t", data, (3, 32))
    assert caught.value.offset_bytes == 27 + 8


def test_the_last_overlay_entry_for_a_weight_counts() -> None:
    flat = (
        bytes(6) + struct.pack("<I", 3) + struct.pack("<Ie", 5, 1) + struct.pack("<Ie", 5, 2) + struct.pack("<Ie", 5, 3)
    )
    assert decode("q1s", flat, (1, 32))[0, 5] == 3
    by_row = bytes(9) + struct.pack("<II", 0, 2) + struct.pack("<He", 5, 1) + struct.pack("<He", 5, 2)
    assert decode("q1t", by_row, (1, 32))[0, 5] == 2


def awkward_weights(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Heavy tails, zeros, a zero row, numbers below the smallest normal f16 and f32."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(2, shape) * 0.05).astype(np.float32).reshape(-1)
    w[rng.random(w.size) < 0.1] = 0
    w[: w.size // 5] *= np.float32(1e-7)
    w[w.size // 2 : w.size // 2 + 3] = np.float32(1e-41)
    w = w.reshape(shape)
    if w.ndim == 2 and shape[0] > 2:
        w[1] = 0
    return w


def encodable_shapes(name: str) -> list[tuple[int, ...]]:
    return [shape for shape in shapes_for(name) if len(shape) <= 3]


@pytest.mark.parametrize("name", sorted(plain_codecs.ENCODERS))
def test_encoders_write_what_plain_python_writes(name: str) -> None:
    for seed, shape in enumerate(encodable_shapes(name)):
        weights = awkward_weights(shape, seed)
        payload = codec(name).encode(weights)
        assert payload.tobytes() == plain_codecs.ENCODERS[name](weights), shape
        assert payload.size == codec(name).nbytes(shape, payload)


@pytest.mark.parametrize("name", ENCODABLE)
def test_round_trip_is_stable(name: str) -> None:
    """What was decoded encodes to something that decodes to (nearly) the same; exact kinds to the same bytes."""
    for seed, shape in enumerate(encodable_shapes(name)):
        first = codec(name).decode(codec(name).encode(awkward_weights(shape, seed)), shape)
        second = codec(name).decode(codec(name).encode(first), shape)
        assert first.shape == shape
        tolerance = 0 if name in ("f32", "f16", "bf16") else 0.02 * np.abs(first).max(initial=0)
        assert np.abs(second - first).max(initial=0) <= tolerance


@pytest.mark.parametrize("name", ENCODABLE)
def test_encoding_does_not_change_its_input_and_takes_strided_arrays(name: str) -> None:
    weights = awkward_weights((64, 64), 0)
    kept = weights.copy()
    straight = codec(name).encode(np.ascontiguousarray(weights.T))
    assert np.array_equal(codec(name).encode(weights.T), straight)
    assert np.array_equal(weights, kept)


@pytest.mark.parametrize("name", ENCODABLE)
def test_encoders_give_the_same_in_small_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = awkward_weights((13, 96), 0)
    whole = codec(name).encode(weights)
    monkeypatch.setattr("cortiq_fcd.io.codecs.codec._BLOCK_WEIGHTS", 200)
    assert np.array_equal(codec(name).encode(weights), whole)


@pytest.mark.parametrize("name", ENCODABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encoders_refuse_non_finite_weights(name: str, bad: float) -> None:
    weights = np.ones((2, 32), np.float32)
    weights[1, 3] = bad
    with pytest.raises(EncodeError, match="flat index 35") as caught:
        codec(name).encode(weights)
    assert caught.value.nonfinite


@pytest.mark.parametrize(
    ("name", "fits", "overflows"),
    [
        ("f16", 65519.0, 65520.0),
        ("bf16", 3.3895e38, 3.4e38),
        ("q8_row", 127 * 65500.0, 127 * 65536.0),
        ("q8_2f", 127 * 65500.0, 3e38),
        ("q4_block", 7 * 65500.0, 7 * 65536.0),
        ("q4_tiled", 7 * 65500.0, 7 * 65536.0),
        ("vbit_ro", 127 * 65500.0, 127 * 65536.0 * 2),
    ],
)
def test_encoders_refuse_what_would_round_to_infinity(name: str, fits: float, overflows: float) -> None:
    weights = np.zeros((1, 32), np.float32)
    for sign in (1, -1):
        weights[0, 5] = sign * fits
        assert np.isfinite(codec(name).decode(codec(name).encode(weights), (1, 32))).all()
        weights[0, 5] = sign * overflows
        with pytest.raises(EncodeError, match="does not fit") as caught:
            codec(name).encode(weights)
        assert not caught.value.nonfinite


def relative_error(name: str, weights: np.ndarray) -> float:
    back = codec(name).decode(codec(name).encode(weights), weights.shape)
    return float(np.linalg.norm(back - weights) / np.linalg.norm(weights))


def test_free_encoders_are_no_worse_than_the_plain_one_of_their_size() -> None:
    rng = np.random.default_rng(0)
    scaled = np.exp(rng.standard_normal((96, 1))) * np.exp(rng.standard_normal(160)) * rng.standard_normal((96, 160))
    weights = scaled.astype(np.float32)
    assert relative_error("q8_2f", weights) < 0.5 * relative_error("q8_row", weights)
    assert relative_error("q4tp", weights) < 1.05 * relative_error("q4_tiled", weights)
    assert relative_error("vbit_ro", weights) < 0.03
    assert codec("vbit_ro").encode(weights).size < codec("q8_row").encode(weights).size


@pytest.mark.parametrize("name", ["q8_2f", "vbit_ro", "q4tp"])
def test_free_encoders_are_off_by_half_a_step_at_most(name: str) -> None:
    """Whatever scales the encoder chose, every weight is at the nearest level, give or take f16 rounding."""
    weights = (np.random.default_rng(3).standard_normal((9, 96)) * 0.1).astype(np.float32)
    weights[4] = 0
    back = codec(name).decode(codec(name).encode(weights), weights.shape)
    top = {"q8_2f": 127, "vbit_ro": 3, "q4tp": 7}[name]
    largest = np.abs(weights).max(axis=1, keepdims=True)
    assert (np.abs(back - weights) <= 0.6 * largest / top + 1e-7).all()
    assert (back[4] == 0).all()


def test_a_zero_matrix_and_one_huge_column() -> None:
    for name in ENCODABLE:
        assert not codec(name).decode(codec(name).encode(np.zeros((3, 64), np.float32)), (3, 64)).any()
    weights = np.full((8, 64), 1e-3, np.float32)
    weights[:, 7] = 3e4
    assert relative_error("q8_2f", weights) < 0.01
    back = codec("q8_2f").decode(codec("q8_2f").encode(weights), (8, 64))
    assert np.abs(back[:, :7] - 1e-3).max() < 1e-5
