"""The generation gate: does greedy text through the served kernel loop?

Perplexity can fall while generation loops, so a checkpoint is chosen only if it also speaks: prompts of 400 validation
tokens are continued greedily, through the streaming kernel with the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from cortiq_fcd.model.conversion import Conversion, is_exact
from cortiq_fcd.model.decode import greedy
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.windows import Ids, free_offsets
from cortiq_fcd.stages.artefacts import Gate, Judgement
from cortiq_fcd.stages.config import GateConfig
from cortiq_fcd.stages.profiles import PROFILES, Profile
from cortiq_fcd.stages.repetition import loop_score, tight_loop

# Validation tokens that the standard profile keeps free behind its last prompt, and how many must be left for prompts.
RESERVED_TOKENS = 500
MIN_SPAN_TOKENS = 400
ROUNDING = 1e-12

Span = tuple[int, int]
Continuations = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompts:
    """Prompt windows ids [prompts, tokens], their offsets in the validation ids; `skipped`: why there are none."""

    ids: Ids
    offsets: tuple[int, ...]
    profile: Profile
    skipped: str = ""


def select_prompts(config: GateConfig, val: Ids, conversion: Conversion, taken: Iterable[Span] = ()) -> Prompts:
    """The gate's prompts, or the reason why it can't run. `taken`: where validation windows lie, [start, stop)."""
    profile = PROFILES[config.profile]
    length = profile.prompt_tokens
    offsets: tuple[int, ...] = ()
    reason = ""
    if not config.enabled:
        reason = "switched off with --no-gate"
    elif conversion.converted and is_exact(length, conversion.w, conversion.sink):
        reason = f"window {conversion.w} + sink {conversion.sink} keep a prompt of {length} tokens on exact attention"
    elif profile.strict:
        offsets, reason = _beside(profile, len(val), taken)
    else:
        offsets, reason = _spread(len(val))
    if reason:
        return Prompts(np.empty((0, length), np.int64), (), profile, reason)
    return Prompts(np.stack([val[o : o + length] for o in offsets]), offsets, profile)


def _spread(tokens: int) -> tuple[tuple[int, ...], str]:
    """Offsets of the standard profile's three prompts, or why there are none."""
    span = tokens - RESERVED_TOKENS
    if span < MIN_SPAN_TOKENS:
        need = RESERVED_TOKENS + MIN_SPAN_TOKENS
        return (), f"the validation text has {tokens} tokens, and prompts need at least {need}"
    return (span // 10, span // 2, 8 * span // 10), ""


def _beside(profile: Profile, tokens: int, taken: Iterable[Span]) -> tuple[tuple[int, ...], str]:
    """Offsets of prompts that touch neither a validation window nor one another, or why there are none."""
    free = free_offsets(tokens, taken, profile.prompt_tokens)
    count = profile.prompts
    if len(free) < count:
        return (), (
            f"the validation text of {tokens} tokens has room for {len(free)} prompts of {profile.prompt_tokens} "
            f"tokens beside the validation windows, and the strict profile needs {count}"
        )
    return tuple(free[i * len(free) // count] for i in range(count)), ""


def run(config: GateConfig, prompts: Prompts, replica: Replica, ranks: Ranks = ALONE) -> Gate | None:
    """The gate, with the present masters (which must be the untrained ones) as its baseline; null when skipped."""
    if prompts.skipped:
        return None
    start = judgement(config, prompts.profile, continuations(prompts, replica, ranks))
    exact = continuations(prompts, replica, ranks, student=False)
    return gate_against(config, prompts, start, judgement(config, prompts.profile, exact, start.scores), ranks)


def gate_against(
    config: GateConfig, prompts: Prompts, start: Judgement, exact: Judgement, ranks: Ranks = ALONE
) -> Gate:
    """The gate whose baseline is known: this run's, or a resumed one's."""

    def judge(candidate: Replica) -> Judgement:
        return judgement(config, prompts.profile, continuations(prompts, candidate, ranks), start.scores)

    return Gate(judge, start, exact)


def continuations(prompts: Prompts, replica: Replica, ranks: Ranks = ALONE, *, student: bool = True) -> Continuations:
    """Ids of each prompt's greedy continuation: the masters through the served kernel, or the teacher. Prompts are
    divided among the ranks.
    """
    own, most = share(ranks, range(len(prompts.ids))), prompts.profile.new_tokens
    spoken = torch.zeros(len(prompts.ids), most, dtype=torch.float64)  # 0: nothing was said; else 1 + id
    # A rank with no prompt takes one that is not its own: ranks may have a model in common, and decode together then.
    ids = torch.from_numpy(prompts.ids[list(own or [0])]).to(replica.weights.embed.device)
    rows = greedy(replica, ids, most, replica.weights.plan.eos_ids, student=student, served=student)
    for prompt, row in zip(own, rows, strict=bool(own)):
        spoken[prompt, : len(row)] = torch.tensor(row, dtype=torch.float64) + 1
    told = torch.tensor(ranks.sum(spoken.flatten().tolist()), dtype=torch.float64).view_as(spoken)
    return tuple(tuple(int(word) - 1 for word in row if word) for row in told.tolist())


def judgement(
    config: GateConfig, profile: Profile, spoken: Continuations, baseline: tuple[float, ...] | None = None
) -> Judgement:
    """The verdict over these continuations; `baseline` null: they are the baseline."""
    scores = tuple(map(loop_score, spoken))
    caught = sum(tight_loop(ids) is not None for ids in spoken) if profile.strict else 0
    passed = passes(config, scores, scores if baseline is None else baseline) and not caught
    return Judgement(scores, passed, spoken, caught)


def loops_of_exact(config: GateConfig, exact: Judgement) -> str:
    """What to tell where even exact attention is over the threshold; "" where it is not."""
    over = [(n, score) for n, score in enumerate(exact.scores, 1) if score > config.threshold + ROUNDING]
    if not over:
        return ""
    scores = ", ".join(f"{score:.2f} on prompt {n}" for n, score in over)
    return (
        f"exact attention itself scores {scores} (limit {config.threshold:.2f}): a checkpoint that speaks as it does "
        "would not pass; consider a higher --gate-threshold or another --val-corpus"
    )


def passes(config: GateConfig, scores: tuple[float, ...], baseline: tuple[float, ...]) -> bool:
    """Whether every prompt's score is within the threshold and within the slack over its baseline; equal passes."""
    return all(passes_one(config, score, before) for score, before in zip(scores, baseline, strict=True))


def passes_one(config: GateConfig, score: float, before: float) -> bool:
    """The same for one prompt."""
    # Scores are ratios of small numbers, so a millionth of a millionth separates nothing; sums round by less.
    return score <= config.threshold + ROUNDING and score <= before + config.slack + ROUNDING
