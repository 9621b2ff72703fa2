"""A frozen model divided over the ranks: each part of a layer lies on one, which sends it to the others whenever all
visit the layer. All ranks must make the same passes over the layers.
"""

from __future__ import annotations

import torch

from cortiq_fcd.model.layer_parts import Fill, Matrices, Part, part_matrices, part_numbers, read_part
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.ranks import Pending, Ranks
from cortiq_fcd.model.streaming import Slots


def owners(plan: ModelPlan, parts: frozenset[Part], world: int) -> dict[Part, int]:
    """The rank that each part lies on: one after the other, the largest first, where there is least."""
    found: dict[Part, int] = {}
    held = [0] * world
    for part in sorted(parts, key=lambda part: (-part_numbers(plan, part), part)):
        found[part] = held.index(min(held))
        held[found[part]] += part_numbers(plan, part)
    return found


class Broadcasts:
    """A `streaming.Source`: `parts` that lie on the ranks."""

    def __init__(self, plan: ModelPlan, fill: Fill, device: torch.device, parts: frozenset[Part], ranks: Ranks) -> None:
        """Reads what belongs on this rank."""
        self._plan, self._ranks = plan, ranks
        self._slots = Slots(device)
        self._matrices: list[dict[Part, Matrices]] = [{}, {}]
        self._pending: list[Pending] = []
        self._owners = owners(plan, parts, ranks.world)
        self._own = {
            part: torch.empty(part_numbers(plan, part), device=device)
            for part in sorted(parts)
            if self._owners[part] == ranks.rank
        }
        self._own_matrices = {part: read_part(plan, fill, part, buffer) for part, buffer in self._own.items()}

    @property
    def own_bytes(self) -> int:
        """Memory of what lies on this rank."""
        return sum(buffer.nbytes for buffer in self._own.values())

    def read(self, parts: tuple[Part, ...], following: tuple[Part, ...]) -> dict[Part, Matrices]:
        """See `Source`."""
        self._finish()
        at, missing = self._slots.take(parts)
        if missing:
            self._start(at, parts)
            self._finish()
        ahead = self._slots.prepare(following)
        if ahead is not None:
            self._start(ahead, following)
        return {part: self._matrices[at][part] for part in parts}

    def any_rank(self, wanted: bool) -> bool:
        """See `Source`."""
        return self._ranks.sum([wanted])[0] > 0

    def _start(self, at: int, parts: tuple[Part, ...]) -> None:
        """Send the parts, or have them sent into a buffer."""
        self._matrices[at] = {}
        away = [part for part in parts if part not in self._own]
        numbers = [part_numbers(self._plan, part) for part in away]
        pieces = dict(zip(away, torch.split(self._slots.buffer(at, sum(numbers)), numbers), strict=True))
        for part in parts:
            buffer = self._own[part] if part in self._own else pieces[part]
            self._pending.append(self._ranks.broadcast(buffer, self._owners[part]))
            here = self._own_matrices.get(part)
            self._matrices[at][part] = here or part_matrices(self._plan, part, buffer)

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for transfer in pending:
            transfer.wait()
