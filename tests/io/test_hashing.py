from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_fcd.io.hashing import Hasher, hash64
from tests.oracles import cmf_reader

MASK = (1 << 64) - 1


def plain_hash64(data: bytes) -> int:
    def fmix64(x: int) -> int:
        x ^= x >> 33
        x = x * 0xFF51AFD7ED558CCD & MASK
        x ^= x >> 33
        x = x * 0xC4CEB9FE1A85EC53 & MASK
        return x ^ x >> 33

    acc = 0
    for i in range(0, len(data), 8):
        acc ^= fmix64(int.from_bytes(data[i : i + 8], "little")) ^ (i // 8 * 0x9E3779B97F4A7C15 & MASK)
    return fmix64(acc ^ len(data))


def test_known_values() -> None:
    assert hash64(b"") == 0
    assert hash64(b"\0") == plain_hash64(b"\0") != 0
    assert f"{hash64(bytes(range(11))):016x}" == f"{plain_hash64(bytes(range(11))):016x}"


@pytest.mark.parametrize("length", [*range(40), 262_143, 262_144, 262_145, 600_001])
def test_lengths_around_words_and_blocks(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    assert hash64(data) == cmf_reader.hash64(data)
    if length < 100:
        assert hash64(data) == plain_hash64(data)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_pieces_of_any_size_give_the_hash_of_the_whole(data: bytes, cuts: list[int]) -> None:
    hasher, at = Hasher(), 0
    for cut in [*sorted(cuts), len(data)]:
        hasher.update(memoryview(data)[at:cut])
        at = max(at, min(cut, len(data)))
    assert hasher.digest() == hasher.digest() == plain_hash64(data)


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(0, 200))
def test_unaligned_memory(offset: int, length: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, offset + length, np.uint8)
    assert hash64(data[offset:]) == plain_hash64(data[offset:].tobytes())


def test_kinds_of_buffer() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = plain_hash64(array.tobytes())
    assert (
        hash64(array) == hash64(array.tobytes()) == hash64(bytearray(array.tobytes())) == hash64(array.data) == expected
    )
    with pytest.raises(TypeError, match="contiguous"):
        hash64(array.T)


def test_the_input_is_not_changed() -> None:
    array = np.arange(1000, dtype=np.uint64)
    hash64(array)
    assert np.array_equal(array, np.arange(1000))
