"""Validation perplexity: exp of the mean NLL over windows."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from cortiq_fcd.kernels.ce_kl import nll_sum
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import Replica, hidden_batches
from cortiq_fcd.model.windows import Ids, validation_offsets, windows


def window_perplexity(
    replica: Replica, ids: Ids, seq: int, batch: int, rounds: int, ranks: Ranks = ALONE, *, student: bool
) -> float:
    """Perplexity over `rounds` * `batch` evenly spaced windows of `seq` tokens: the student's through its O(1) kernel,
    sealed as in training, or the teacher's.
    """
    offsets = validation_offsets(len(ids), seq, rounds * batch)
    return perplexity_at(replica, ids, offsets, seq, batch, ranks, student=student)


def perplexity_at(
    replica: Replica,
    ids: Ids,
    offsets: list[int],
    seq: int,
    batch: int,
    ranks: Ranks = ALONE,
    *,
    student: bool,
    keep: Callable[[Tensor], object] | None = None,
) -> float:
    """Perplexity over the windows of `seq` tokens at `offsets`, divided among the ranks, `batch` at a time on all.

    `keep` is shown what the head multiplies, [B * seq, C], batch by batch of this rank's.
    """
    weights = replica.weights if student else replica.teacher
    device = replica.weights.embed.device
    counted, size = list(share(ranks, offsets)), batch // ranks.world
    own = counted or offsets[:1]  # ranks may have a model in common: none can leave a pass out
    batches = [windows(ids, own[start : start + size], seq, device) for start in range(0, len(own), size)]
    seal = replica.conversion.seal if student else None
    total = 0.0
    hidden = hidden_batches(replica, [inputs for inputs, _ in batches], student=student, seal=seal)
    for rows, (_, targets) in zip(hidden, batches, strict=True):
        if keep is not None:
            keep(rows)
        nll = nll_sum(rows, weights.head, targets.reshape(-1), softcap=weights.plan.logit_softcap)
        total += nll if counted else 0.0
    mean = ranks.sum([total])[0] / (len(offsets) * seq)
    # exp overflows past 709 nats, which only a broken model reaches.
    return math.exp(mean) if mean < 700 else math.inf
