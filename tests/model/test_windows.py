"""Which windows are trained on and which validate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.model.windows import SplitMix64, training_offsets, validation_offsets, windows

# The published test vector (seed 1234567), and the first numbers of seed 0 worked out from the definition by hand.
VECTORS = {
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
}


@pytest.mark.parametrize("seed", VECTORS)
def test_splitmix64(seed: int) -> None:
    generator = SplitMix64(seed)
    assert [generator.next_u64() for _ in VECTORS[seed]] == VECTORS[seed]


def test_the_state_stays_in_64_bits() -> None:
    generator = SplitMix64(2**64 - 1)
    for _ in range(10):
        assert 0 <= generator.next_u64() < 2**64
        assert 0 <= generator.state < 2**64


def test_training_offsets_by_hand() -> None:
    # Seed 0, 1000 tokens, windows of 10: the numbers above modulo 1000 - 10 - 1.
    generator = SplitMix64(0)
    first = training_offsets(generator, 1000, 10, 2)
    assert first == [0xE220A8397B1DCDAF % 989, 0x6E789E6AA1B965F4 % 989]
    assert training_offsets(generator, 1000, 10, 1) == [0x06C45D188009454F % 989]


def test_the_shortest_text_has_one_training_window() -> None:
    assert training_offsets(SplitMix64(3), 12, 10, 4) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "seq", "count", "expected"),
    [
        (1000, 99, 4, [0, 225, 450, 675]),  # stride (1000 - 99 - 1) // 4
        (1003, 99, 4, [0, 225, 450, 675]),  # the remainder is left at the end
        (104, 99, 4, [0, 1, 2, 3]),  # stride 1
        (102, 99, 4, [0, 1, 2, 2]),  # stride 1 though 2 // 4 is 0; the last one would pass the end
        (100, 99, 4, [0, 0, 0, 0]),  # one window
        (108, 99, 4, [0, 2, 4, 6]),
    ],
)
def test_validation_offsets_by_hand(tokens: int, seq: int, count: int, expected: list[int]) -> None:
    assert validation_offsets(tokens, seq, count) == expected


@given(seq=st.integers(1, 50), extra=st.integers(1, 500), count=st.integers(1, 20), seed=st.integers(0, 2**64 - 1))
def test_every_window_and_its_last_target_lie_in_the_text(seq: int, extra: int, count: int, seed: int) -> None:
    tokens = seq + extra
    for offset in validation_offsets(tokens, seq, count):
        assert 0 <= offset <= tokens - seq - 1
    if extra >= 2:
        for offset in training_offsets(SplitMix64(seed), tokens, seq, count):
            assert 0 <= offset < tokens - seq - 1


def test_targets_are_the_next_tokens() -> None:
    ids, targets = windows(np.arange(100, 150), [0, 45, 7], 4, torch.device("cpu"))
    assert ids.tolist() == [[100, 101, 102, 103], [145, 146, 147, 148], [107, 108, 109, 110]]
    assert targets.tolist() == [[101, 102, 103, 104], [146, 147, 148, 149], [108, 109, 110, 111]]
    assert ids.is_contiguous()
    assert targets.is_contiguous()
