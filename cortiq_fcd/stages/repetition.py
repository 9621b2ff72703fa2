"""How much a generated text repeats itself, from its token ids alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cortiq_fcd.stages.report import Repetition, TextRepetition

NGRAM = 4
LONGEST_PERIOD = 32
TIGHT_REPEATS = 4

Ids = Sequence[int]


def loop_score(ids: Ids) -> float:
    """1 - unique 4-grams / all 4-grams: 0 without a repetition, near 1 in a tight loop; 0 for fewer than 5 ids."""
    return repeated_share(ids, NGRAM)


def repeated_share(ids: Ids, n: int) -> float:
    """rep-n of Welleck et al. 2020: 1 - unique n-grams / all n-grams; 0 for no more than n ids."""
    if len(ids) <= n:
        return 0.0
    grams = ngrams(ids, n)
    return 1 - len(set(grams)) / len(grams)


def diversity(ids: Ids) -> float:
    """Product of 1 - rep-n over n = 2, 3, 4 (Su et al. 2022): 1 without a repetition, 0 for nothing else."""
    return math.prod(1 - repeated_share(ids, n) for n in (2, 3, 4))


def distinct(texts: Iterable[Ids], n: int) -> float | None:
    """distinct-n of Li et al. 2016: unique n-grams of all texts together / all of them; null when there are none."""
    grams = [gram for ids in texts for gram in ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else None


def tight_loop(ids: Ids) -> int | None:
    """Period, 1 to 32 ids, of a loop in which the text is caught: one that its last four repetitions end in; null when
    there is none. A text that went on to its end-of-text id has left its loop.
    """
    for period in range(1, min(LONGEST_PERIOD, len(ids) // TIGHT_REPEATS) + 1):
        tail = ids[len(ids) - TIGHT_REPEATS * period :]
        if tail[period:] == tail[:-period]:
            return period
    return None


def measured(texts: Sequence[Ids]) -> Repetition | None:
    """All of it for the continuations of one set of weights; null when there are none."""
    if not texts:
        return None
    distinct_1, distinct_2, distinct_3 = (distinct(texts, n) for n in (1, 2, 3))
    return Repetition(
        texts=[_measured(ids) for ids in texts], distinct_1=distinct_1, distinct_2=distinct_2, distinct_3=distinct_3
    )


def _measured(ids: Ids) -> TextRepetition:
    rep_2, rep_3, rep_4 = (repeated_share(ids, n) for n in (2, 3, 4))
    return TextRepetition(
        tokens=len(ids),
        loop_score=loop_score(ids),
        tight_loop=tight_loop(ids),
        rep_2=rep_2,
        rep_3=rep_3,
        rep_4=rep_4,
        diversity=diversity(ids),
    )


def ngrams(ids: Ids, n: int = NGRAM) -> list[tuple[int, ...]]:
    """All runs of n ids, in order."""
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
