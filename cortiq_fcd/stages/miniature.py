"""What a model of many layers costs, from models of a few of its layers: every cost here is linear in the layers.

A miniature has the real embedding, head and windows, and 1 layer, or 1 + REPEATS of a kind; the difference is the cost
of such a layer. Memory is tallied over blank weights, which take next to none themselves, time is measured over random
ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.replica import Replica, new_replica
from cortiq_fcd.model.weights import FrozenWeights, load_weights
from cortiq_fcd.stages.tally import Tally

REPEATS = 3
TRIES = 2
SLOW_S = 5.0  # what takes as long is not tried again

Work = Callable[[Replica], object]
Build = Callable[[tuple[int, ...]], Replica]
Cost = Callable[[Build, tuple[int, ...], Work], float]


@dataclass(frozen=True)
class Miniatures:
    """Builds models of some of a model's layers on a device, with a teacher of their own if the model has one."""

    plan: ModelPlan
    teacher_plan: ModelPlan | None
    conversion: Conversion
    device: torch.device
    blank: bool  # weights of 0

    def build(self, layers: tuple[int, ...]) -> Replica:
        """A replica of these layers, in this order; one may come more than once."""
        trained = tuple(at for at, layer in enumerate(layers) if layer in self.conversion.layers)
        teacher = None if self.teacher_plan is None else _weights(self.teacher_plan, layers, self)
        return new_replica(_weights(self.plan, layers, self), replace(self.conversion, layers=trained), teacher)

    def of_all(self, work: Work, cost: Cost) -> float:
        """The cost of a work on the whole model."""
        alone, each = self.of_each(work, cost)
        return alone + sum(each.values())

    def of_one(self, work: Work, cost: Cost) -> float:
        """The cost of a work on the deepest trained layer alone."""
        return cost(self.build, (max(self.conversion.layers),), work)

    def of_each(self, work: Work, cost: Cost) -> tuple[float, dict[int, float]]:
        """The cost of a work on the deepest trained layer alone, and what every other layer adds to it.

        Below the first trained layer nothing is kept for the backward.
        """
        base = max(self.conversion.layers)
        others = [layer for layer in range(len(self.plan.layers)) if layer != base]
        kinds = {layer: self._kind(layer) for layer in others}
        alone = cost(self.build, (base,), work)
        more: dict[tuple[int, bool], float] = {}
        for kind in dict.fromkeys(kinds.values()):
            layer, below = kind
            layers = (layer,) * REPEATS
            with_more = cost(self.build, (*layers, base) if below else (base, *layers), work)
            more[kind] = max(0.0, with_more - alone) / REPEATS
        return alone, {layer: more[kind] for layer, kind in kinds.items()}

    def _kind(self, layer: int) -> tuple[int, bool]:
        """The first layer that costs the same, and whether it lies below every trained one."""
        below = layer < min(self.conversion.layers)
        like = next(i for i in range(layer + 1) if (i < min(self.conversion.layers)) == below and self._same(i, layer))
        return like, below

    def _same(self, a: int, b: int) -> bool:
        trained = self.conversion.layers
        return (a in trained) == (b in trained) and _look(self.plan, a) == _look(self.plan, b)


def _look(plan: ModelPlan, layer: int) -> tuple[str, tuple[int, ...]]:
    """What a layer is made of, whatever its number."""
    own = plan.layers[layer]
    return re.sub(r"\.\d+\.", ".", repr(replace(own, index=0))), plan.shapes[own.down_proj]


def peak_bytes(build: Build, layers: tuple[int, ...], work: Work) -> float:
    """The most bytes that a work has alive at once, beside weights, masters and gradient."""
    replica = build(layers)
    with Tally() as tally:
        work(replica)
    return float(tally.peak_bytes)


def seconds(build: Build, layers: tuple[int, ...], work: Work) -> float:
    """The time that a work takes: the best of a few tries, unless one is slow already."""
    replica = build(layers)
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        work(replica)
        _synchronize(replica.weights.embed)
        best = min(best, time.perf_counter() - began)
        if best >= SLOW_S:
            break
    return best


def _synchronize(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def _weights(plan: ModelPlan, layers: Iterable[int], of: Miniatures) -> FrozenWeights:
    """Weights of such layers."""
    generator = torch.Generator().manual_seed(0)

    def fill(name: str, out: Tensor) -> None:
        shape = plan.shapes[name]
        out.copy_(torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator))
        out.mul_(1 if len(shape) == 1 else shape[-1] ** -0.5)

    small = replace(plan, layers=tuple(plan.layers[i] for i in layers))
    return load_weights(small, None if of.blank else fill, of.device)
