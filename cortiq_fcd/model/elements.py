"""What a recipe may add to the certified step, as plain numbers. The defaults add nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Elements:
    """`temperature` of the KL; `match`: weight of the loss that draws every trained layer's output to the exact
    teacher's; `gain_limit`: rows of the O(1) kernel that amplify more get no gradient; `seal`: of this step's windows,
    null: the conversion's.
    """

    temperature: float = 1.0
    match: float = 0.0
    gain_limit: float = math.inf
    seal: int | None = None


CERTIFIED = Elements()


@dataclass(frozen=True)
class StepLoss:
    """Means over a step's positions, unweighted: ce and kl in nats, match without a unit. `wild_rows`: rows of the O(1)
    kernel (a position of a head of a layer) that came out longer than every value they sum.
    """

    ce: float
    kl: float
    match: float
    wild_rows: int
