"""What a model of many layers costs, from models of a few of its layers: every cost here is linear in the layers.

A miniature has the real embedding, head and windows, and 1 layer, or 1 + REPEATS of a kind; the difference is the cost
of such a layer. Memory is tallied over blank weights, which take next to none themselves, time is measured over random
ones.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.replica import Replica, new_replica
from cortiq_fcd.model.weights import FrozenWeights, load_weights
from cortiq_fcd.stages.tally import Tally

REPEATS = 3
TRIES = 2

Work = Callable[[Replica], object]
Build = Callable[[tuple[int, ...]], Replica]


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

    def of_all(self, work: Work, cost: Callable[[Build, tuple[int, ...], Work], float]) -> float:
        """The cost of a work on the whole model. Below the first trained layer nothing is kept for the backward."""
        base = max(self.conversion.layers)
        kinds = Counter(self._kind(layer) for layer in range(len(self.plan.layers)))
        kinds[self._kind(base)] -= 1
        alone = total = cost(self.build, (base,), work)
        for kind, count in kinds.items():
            layer, below = kind[0], kind[1]
            more = (layer,) * REPEATS
            with_more = cost(self.build, (*more, base) if below else (base, *more), work)
            total += count * max(0.0, with_more - alone) / REPEATS
        return total

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
    """The time that a work takes: the best of a few tries."""
    replica = build(layers)
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        work(replica)
        _synchronize(replica.weights.embed)
        best = min(best, time.perf_counter() - began)
    return best


def _synchronize(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def _weights(plan: ModelPlan, layers: Iterable[int], of: Miniatures) -> FrozenWeights:
    """Weights of such layers."""
    generator = torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        shape = plan.shapes[name]
        if of.blank:
            return torch.from_numpy(np.zeros(shape, np.float32))  # pages that are only read stay unallocated
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)

    return load_weights(replace(plan, layers=tuple(plan.layers[i] for i in layers)), read, of.device)
