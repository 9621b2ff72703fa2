"""`eval --sweep`: what the setting of the O(1) kernel costs, one number of it changed at a time, before any training.

All tokens of a window are computed at once, by the same function as the served kernel's, so a setting takes one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from cortiq_fcd.model.conversion import Conversion, is_exact, landmark_count
from cortiq_fcd.model.damage import kl_to_exact, nll, tail_rows
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.windows import Ids, windows
from cortiq_fcd.stages.readings import SweepRow, Varied

FEWEST_LANDMARKS = 4
LANDMARKS = (FEWEST_LANDMARKS, 8, 16, 32, 64, 128)
WINDOW_FACTORS = (0.25, 0.5, 1, 2, 4)
SINKS = (0, 1, 4, 16)


def settings(base: Conversion) -> Iterator[tuple[Varied, Conversion]]:
    """What is measured, and what is varied in it: landmarks (0: no far field), the window (also with few landmarks and
    with none), and sinks. A setting under which windows of text would stay exact is left out.
    """
    most = landmark_count(base.seal, base.seal)
    for m in sorted({0, landmark_count(base.seal, base.m), *(m for m in LANDMARKS if m <= most)}):
        yield "landmarks", replace(base, m=m)
    for w in sorted({max(1, round(base.w * factor)) for factor in WINDOW_FACTORS}):
        if not is_exact(base.seal, w, base.sink):
            for m in dict.fromkeys((landmark_count(base.seal, base.m), FEWEST_LANDMARKS, 0)):
                yield "window", replace(base, w=w, m=m)
    for sink in sorted({base.sink, *SINKS}):
        if not is_exact(base.seal, base.w, sink):
            yield "sinks", replace(base, sink=sink, m=landmark_count(base.seal, base.m))


def run(network: Replica, text: Ids, offsets: list[int], seq: int, batch: int) -> list[SweepRow]:
    """Every setting around the network's own, over the windows of the text at `offsets`, `batch` at a time."""
    device, base = network.weights.embed.device, network.conversion
    parts = [offsets[start : start + batch] for start in range(0, len(offsets), batch)]
    ids, targets = zip(*(windows(text, part, seq, device) for part in parts), strict=True)
    exact = tail_rows(network, ids, exact=True)
    positions = len(offsets) * (seq - base.seal)
    exact_nats = sum(nll(rows, target, network) for rows, target in zip(exact, targets, strict=True)) / positions
    measured: dict[Conversion, tuple[float, float]] = {}
    found = []
    for varied, conversion in settings(base):
        if conversion not in measured:
            rows = tail_rows(replace(network, conversion=conversion), ids, exact=False)
            nats = sum(nll(some, target, network) for some, target in zip(rows, targets, strict=True)) / positions
            kl = sum(kl_to_exact(a, b, network) for a, b in zip(rows, exact, strict=True)) / positions
            measured[conversion] = nats, kl
        nats, kl = measured[conversion]
        found.append(
            SweepRow(
                varied=varied,
                m=conversion.m or None,
                w=conversion.w,
                sink=conversion.sink,
                ppl=_exp(nats),
                ratio=_exp(nats - exact_nats),
                kl=kl if math.isfinite(kl) else None,
            )
        )
    return found


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 700 else None
