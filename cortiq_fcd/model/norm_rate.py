"""A learning rate of their own for the norm gains, beside any optimizer.

AdamW's step, its decay included, is linear in the rate. So a step at `factor` times the rate is the step that was
taken, made `factor` times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cortiq_fcd.model.replica import Replica


@contextlib.contextmanager
def norm_steps(replica: Replica, factor: float) -> Iterator[None]:
    """Make the step that is taken inside the block `factor` times as long for every trained gain."""
    if factor == 1:
        yield
        return
    gains = [gain for own in replica.masters.layers.values() for gain in (own.input_norm, own.post_norm)]
    before = [gain.clone() for gain in gains]
    yield
    for gain, old in zip(gains, before, strict=True):
        gain.sub_(old).mul_(factor).add_(old)
