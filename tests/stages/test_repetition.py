"""What is measured on generated texts, by hand and against plain definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.stages.repetition import distinct, diversity, loop_score, measured, repeated_share, tight_loop


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([], None),
        ([5, 5, 5], None),  # three times are not four
        ([5, 5, 5, 5], 1),
        ([9, 8, 7, 5, 5, 5, 5], 1),
        ([5, 5, 5, 5, 6], None),  # it has left the loop
        ([1, 2] * 4, 2),
        ([2] + [1, 2] * 3, None),  # three and a half
        ([2] + [1, 2] * 4, 2),
        ([0, *range(1, 33)] + list(range(1, 33)) * 3, 32),
        ([*range(1, 34)] * 4, None),  # period 33 is no tight loop
        (list(range(128)), None),
    ],
)
def test_tight_loop_by_hand(ids: list[int], period: int | None) -> None:
    assert tight_loop(ids) == period


@given(st.lists(st.integers(0, 2), max_size=140))
def test_tight_loop_is_its_definition(ids: list[int]) -> None:
    """A suffix of 4 p ids in which every id is the one p before it, for the smallest such p up to 32."""
    periods = [
        p for p in range(1, 33) if 4 * p <= len(ids) and all(ids[-i] == ids[-i - p] for i in range(1, 3 * p + 1))
    ]
    assert tight_loop(ids) == (periods[0] if periods else None)


def test_a_tight_loop_can_have_a_low_score() -> None:
    """Four repetitions at the end of a long text: the score alone would let it pass."""
    text = [*range(116), *[200, 201, 202] * 4]
    assert tight_loop(text) == 3
    assert loop_score(text) < 0.1


def test_shares_by_hand() -> None:
    ids = [1, 2, 1, 2, 1]  # 2-grams 12 21 12 21, 3-grams 121 212 121, 4-grams 1212 2121
    assert repeated_share(ids, 2) == pytest.approx(1 - 2 / 4)
    assert repeated_share(ids, 3) == pytest.approx(1 - 2 / 3)
    assert repeated_share(ids, 4) == loop_score(ids) == 0.0
    assert diversity(ids) == pytest.approx(2 / 4 * 2 / 3)
    assert repeated_share([1, 1, 1], 3) == 0.0
    assert distinct([[1, 2, 1], [1, 2]], 1) == pytest.approx(2 / 5)
    assert distinct([[1, 2, 1], [1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1], []], 2) is None


def test_distinct_sees_that_all_texts_are_the_same() -> None:
    text = list(range(60))
    assert distinct([text] * 16, 2) == pytest.approx(1 / 16)
    assert diversity(text) == 1.0


@given(st.lists(st.lists(st.integers(0, 4), max_size=70), min_size=1, max_size=5))
def test_measured_is_the_parts(texts: list[list[int]]) -> None:
    found = measured(texts)
    assert found is not None
    assert [t.tokens for t in found.texts] == [len(t) for t in texts]
    assert [t.loop_score for t in found.texts] == [t.rep_4 for t in found.texts] == [loop_score(t) for t in texts]
    for text in found.texts:
        assert text.diversity == pytest.approx(math.prod((1 - text.rep_2, 1 - text.rep_3, 1 - text.rep_4)))
    assert (found.distinct_1, found.distinct_3) == (distinct(texts, 1), distinct(texts, 3))
    assert measured([]) is None
