"""Before and after, on windows that chose nothing: whole windows, served positions, and text that nothing touched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.ce_kl import kl_sum, nll_sum
from cortiq_fcd.model.decode import served_hidden
from cortiq_fcd.model.perplexity import perplexity_at, window_perplexity
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import Replica, hidden_batches
from cortiq_fcd.model.windows import (
    FINAL_ROUNDS,
    QUICK_ROUNDS,
    Ids,
    free_offsets,
    measured_spans,
    validation_offsets,
    windows,
)
from cortiq_fcd.stages.artefacts import Figures
from cortiq_fcd.stages.config import TrainConfig


@dataclass(frozen=True)
class Windows:
    """Offsets in the validation ids: the six-round windows, and windows that neither chose nor judged anything."""

    val: Ids
    final: tuple[int, ...]
    untouched: tuple[int, ...]


def select_windows(config: TrainConfig, val: Ids, gate_offsets: tuple[int, ...], gate_tokens: int) -> Windows:
    """The windows to measure on. `gate_offsets`: where the gate's prompts of `gate_tokens` begin."""
    final = validation_offsets(len(val), config.seq, FINAL_ROUNDS * config.batch)
    taken = measured_spans(len(val), config.seq, config.batch) + [(o, o + gate_tokens) for o in gate_offsets]
    free = free_offsets(len(val), taken, config.seq + 1)
    wanted = QUICK_ROUNDS * config.batch
    step = max(1, len(free) // wanted)
    return Windows(val, tuple(final), tuple(free[::step][:wanted]))


@dataclass
class TeacherRows:
    """What the teacher's head multiplies at the served positions of the final windows, [N, C]; null: not known yet.

    Whoever measures the teacher and then a student hands both the same one: the teacher runs once.
    """

    rows: Tensor | None = None


def run(
    config: TrainConfig,
    replica: Replica,
    where: Windows,
    ranks: Ranks = ALONE,
    *,
    student: bool,
    teacher: TeacherRows | None = None,
) -> Figures:
    """Figures of the present masters, or (student false) of the teacher. Windows are divided among the ranks."""
    teacher = teacher or TeacherRows()
    if student:
        final = window_perplexity(replica, where.val, config.seq, config.batch, FINAL_ROUNDS, ranks, student=True)
    else:
        final, teacher.rows = _teacher_pass(config, replica, where, ranks)
    served, kl = _served(config, replica, where, teacher, ranks, student=student)
    untouched = None
    if where.untouched:
        offsets = list(where.untouched)
        untouched = perplexity_at(replica, where.val, offsets, config.seq, config.batch, ranks, student=student)
    return Figures(final, served, kl, untouched)


def _teacher_pass(config: TrainConfig, replica: Replica, where: Windows, ranks: Ranks) -> tuple[float, Tensor]:
    """The teacher's perplexity over the final windows, and its rows at the served positions of this rank's."""
    kept: list[Tensor] = []

    def keep(hidden: Tensor) -> None:
        kept.append(_after_seal(hidden, config, replica))

    offsets = list(where.final)
    final = perplexity_at(replica, where.val, offsets, config.seq, config.batch, ranks, student=False, keep=keep)
    return final, torch.cat(kept)


def _after_seal(hidden: Tensor, config: TrainConfig, replica: Replica) -> Tensor:
    """Rows [B * seq, C] at the positions from the seal on."""
    windows_of_rows = hidden.view(-1, config.seq, hidden.shape[1])
    return windows_of_rows[:, replica.conversion.seal :].flatten(0, 1)


def _served(
    config: TrainConfig, replica: Replica, where: Windows, known: TeacherRows, ranks: Ranks, *, student: bool
) -> tuple[float, float]:
    """Perplexity and mean KL to the teacher at the positions from the seal on."""
    seal, own, teacher = replica.conversion.seal, replica.weights, replica.teacher
    head, measured = own.head, own if student else teacher
    kl = 0.0
    # All windows move in step through the decoder: the larger the batch, the fewer the passes over the weights.
    ids, targets = windows(where.val, list(share(ranks, where.final)), config.seq, head.device)
    count = len(where.final) * (config.seq - seal)
    if count == 0:
        return math.nan, math.nan
    teacher_rows = known.rows
    if teacher_rows is None:
        hidden = hidden_batches(replica, torch.split(ids, config.batch // ranks.world), student=False)
        teacher_rows = torch.cat([_after_seal(rows, config, replica) for rows in hidden])
    rows = served_hidden(replica, ids, seal, student=True, served=True).flatten(0, 1) if student else teacher_rows
    nll = nll_sum(rows, measured.head, targets[:, seal:].reshape(-1), softcap=measured.plan.logit_softcap)
    if student:
        kl = kl_sum(
            rows,
            teacher_rows,
            head,
            teacher_head=None if teacher.head is head else teacher.head,
            softcap=own.plan.logit_softcap,
            teacher_softcap=teacher.plan.logit_softcap,
        )
    nll, kl = ranks.sum([nll, kl])
    return math.exp(min(nll / count, 700.0)), kl / count
