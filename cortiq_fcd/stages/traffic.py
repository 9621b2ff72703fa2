"""What the processes of a run send one another in a training step, in bytes, without the headers of the transport."""

from __future__ import annotations

import torch

from cortiq_fcd.model.broadcasts import owners
from cortiq_fcd.model.gradient_sum import sent_bytes
from cortiq_fcd.model.layer_parts import Part, part_numbers
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.replica import visits
from cortiq_fcd.model.streaming import Slots
from cortiq_fcd.stages.report import MemoryInfo, RanksInfo
from cortiq_fcd.stages.savings import all_parts, unused_parts
from cortiq_fcd.stages.works import Sizes

SCALARS = 5  # of the loss four, and the square of the gradient's norm, as f64


def step_bytes(sizes: Sizes) -> list[int]:
    """What each rank sends in a step that follows another one."""
    sharding = sizes.sharding
    others = sharding.world - 1
    sent = [sent_bytes(sizes.trained, sharding.world) + SCALARS * 8 * others] * sharding.world
    if sharding.model:
        for sender, numbers in _broadcasts(sizes):
            sent[sender] += numbers * 4 * others
    return sent


def ranks_info(sizes: Sizes, memory: list[MemoryInfo]) -> RanksInfo:
    """What a report says of several processes; `memory`: of each."""
    return RanksInfo(
        shard_optimizer=sizes.sharding.optimizer,
        shard_model=sizes.sharding.model,
        sent_bytes=step_bytes(sizes),
        peak_rss_bytes=[info.peak_rss_bytes for info in memory],
    )


def _broadcasts(sizes: Sizes) -> list[tuple[int, int]]:
    """What is sent of divided models in a step, as `model.replica.loss_and_gradient` visits the layers: the rank that
    sends, and how many numbers.
    """
    plan, teacher, conversion, world = sizes.plan, sizes.teacher_plan, sizes.conversion, sizes.sharding.world
    order, below = list(visits(plan)), min(conversion.layers)
    whole, student = all_parts(plan), all_parts(plan) - frozenset((i, "ffn") for i in conversion.layers)
    own = _Buffers(plan, whole if teacher is None else whole - unused_parts(conversion, teacher), world)
    its = own if teacher is None else _Buffers(teacher, all_parts(teacher), world)
    for _ in range(2):
        own.sent.clear()
        its.sent.clear()
        own.walk(order[:below], student)
        if teacher is None:
            own.walk(order[below:], whole)
        else:
            its.walk(list(visits(teacher))[:below], all_parts(teacher))
            its.walk(list(visits(teacher))[below:], all_parts(teacher))
        own.walk(order[below:], student)
        own.walk(order[below:][::-1], student)
    return own.sent if teacher is None else own.sent + its.sent


class _Buffers:
    """What is sent into the two buffers of a divided model."""

    def __init__(self, plan: ModelPlan, parts: frozenset[Part], world: int) -> None:
        self._slots = Slots(torch.device("cpu"))
        self._owners = owners(plan, parts, world)
        self._numbers = {part: part_numbers(plan, part) for part in parts}
        self.sent: list[tuple[int, int]] = []

    def walk(self, order: list[int | None], there: frozenset[Part]) -> None:
        """Visit layers, of which these parts are wanted."""
        wanted = [tuple(sorted(part for part in there if part[0] == i)) for i in order if i is not None]
        for parts, following in zip(wanted, [*wanted, ()][1:], strict=True):
            missing = parts if self._slots.take(parts)[1] else ()
            ahead = following if self._slots.prepare(following) is not None else ()
            self.sent += [(self._owners[part], self._numbers[part]) for part in (*missing, *ahead)]
