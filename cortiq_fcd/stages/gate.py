"""The generation gate: does greedy text through the served kernel loop?

Perplexity can fall while generation loops, so a checkpoint is chosen only if it also speaks: three prompts of 400
validation tokens are continued greedily for 60, through the streaming kernel with the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cortiq_fcd.model.conversion import Conversion, is_exact
from cortiq_fcd.model.decode import greedy
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.windows import Ids
from cortiq_fcd.stages.artefacts import Gate, Judgement
from cortiq_fcd.stages.config import GateConfig

PROMPT_TOKENS = 400
NEW_TOKENS = 60
# Validation tokens kept free behind the last prompt, and how many must be left to place prompts in.
RESERVED_TOKENS = 500
MIN_SPAN_TOKENS = 400
NGRAM = 4
ROUNDING = 1e-12


@dataclass(frozen=True)
class Prompts:
    """Prompt windows ids [3, 400] and their offsets in the validation ids; `skipped` says why there are none."""

    ids: Ids
    offsets: tuple[int, ...]
    skipped: str = ""


def select_prompts(config: GateConfig, val: Ids, conversion: Conversion) -> Prompts:
    """The gate's prompts, or the reason why it can't run."""
    span = len(val) - RESERVED_TOKENS
    reason = ""
    if not config.enabled:
        reason = "switched off with --no-gate"
    elif span < MIN_SPAN_TOKENS:
        need = RESERVED_TOKENS + MIN_SPAN_TOKENS
        reason = f"the validation text has {len(val)} tokens, and prompts need at least {need}"
    elif conversion.converted and is_exact(PROMPT_TOKENS, conversion.w, conversion.sink):
        reason = (
            f"window {conversion.w} + sink {conversion.sink} keep a prompt of {PROMPT_TOKENS} tokens on exact attention"
        )
    if reason:
        return Prompts(np.empty((0, PROMPT_TOKENS), np.int64), (), reason)
    offsets = (span // 10, span // 2, 8 * span // 10)
    return Prompts(np.stack([val[o : o + PROMPT_TOKENS] for o in offsets]), offsets)


def run(config: GateConfig, prompts: Prompts, replica: Replica) -> Gate | None:
    """The gate, with the present masters (which must be the untrained ones) as its baseline; null when skipped."""
    if prompts.skipped:
        return None
    start = _judgement(config, continuations(prompts, replica))
    exact = continuations(prompts, replica, student=False)
    return gate_against(config, prompts, start, _judgement(config, exact, start.scores))


def gate_against(config: GateConfig, prompts: Prompts, start: Judgement, exact: Judgement) -> Gate:
    """The gate whose baseline is known: this run's, or a resumed one's."""

    def judge(candidate: Replica) -> Judgement:
        return _judgement(config, continuations(prompts, candidate), start.scores)

    return Gate(judge, start, exact)


def continuations(prompts: Prompts, replica: Replica, *, student: bool = True) -> tuple[tuple[int, ...], ...]:
    """Ids of each prompt's greedy continuation: the masters through the served kernel, or the teacher."""
    ids = torch.from_numpy(prompts.ids).to(replica.weights.embed.device)
    eos = replica.weights.plan.eos_ids
    return tuple(tuple(row) for row in greedy(replica, ids, NEW_TOKENS, eos, student=student, served=student))


def _judgement(
    config: GateConfig, spoken: tuple[tuple[int, ...], ...], baseline: tuple[float, ...] | None = None
) -> Judgement:
    """The verdict over these continuations; `baseline` null: they are the baseline."""
    scores = tuple(map(loop_score, spoken))
    return Judgement(scores, passes(config, scores, scores if baseline is None else baseline), spoken)


def loop_score(ids: Sequence[int]) -> float:
    """1 - unique 4-grams / all 4-grams: 0 without a repetition, near 1 in a tight loop; 0 for fewer than 5 ids."""
    if len(ids) <= NGRAM:
        return 0.0
    grams = ngrams(ids)
    return 1 - len(set(grams)) / len(grams)


def ngrams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """All runs of four ids, in order."""
    return [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]


def passes(config: GateConfig, scores: tuple[float, ...], baseline: tuple[float, ...]) -> bool:
    """Whether every prompt's score is within the threshold and within the slack over its baseline; equal passes."""
    # Scores are ratios of small numbers, so a millionth of a millionth separates nothing; sums round by less.
    return all(
        score <= config.threshold + ROUNDING and score <= before + config.slack + ROUNDING
        for score, before in zip(scores, baseline, strict=True)
    )
