"""What a polish can do to need less memory. No result depends on any of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cortiq_fcd.model.broadcasts import owners
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.layer_parts import Kind, Part, matrix_names
from cortiq_fcd.model.plan import ModelPlan

_WORD_BYTES = 4
_KINDS: tuple[Kind, Kind] = ("mixer", "ffn")


@dataclass(frozen=True)
class Savings:
    """Parts of layers that are read from the file at every visit, of the model and of a teacher file; layers whose
    activations are computed again; whether the best state is on disk and checkpoints are written without a copy; and
    whether the optimizer's moments are on disk as well.
    """

    streamed: frozenset[Part] = frozenset()
    teacher_streamed: frozenset[Part] = frozenset()
    recomputed: frozenset[int] = frozenset()
    on_disk: bool = False
    moments_on_disk: bool = False


def unused_parts(conversion: Conversion, teacher: ModelPlan | None) -> frozenset[Part]:
    """Parts of the model that no pass needs: what is trained, when a file of its own teaches."""
    return frozenset((i, "ffn") for i in conversion.layers) if teacher is not None else frozenset()


def no_savings(conversion: Conversion, teacher: ModelPlan | None) -> Savings:
    """What costs nothing."""
    return Savings(unused_parts(conversion, teacher))


def ladder(plan: ModelPlan, teacher: ModelPlan | None, conversion: Conversion) -> Iterator[Savings]:
    """More and more savings, those that cost the least time first.

    Reading takes about as long as there are bytes, at every visit of a step; computing a layer again takes longer.
    """
    taken = replace(no_savings(conversion, teacher), on_disk=True)
    yield taken
    parts = sorted(_used_parts(plan, teacher, conversion), key=lambda used: used[0])
    for _, own, part in parts:
        if own:
            taken = replace(taken, streamed=taken.streamed | {part})
        else:
            taken = replace(taken, teacher_streamed=taken.teacher_streamed | {part})
        yield taken
    for i in _with_activations(plan, conversion):
        # The deepest trained layer is the first in the backward: computing it again would save nothing.
        if i != max(conversion.layers):
            taken = replace(taken, recomputed=taken.recomputed | {i})
            yield taken
    # Last, because it writes to the disk in every step.
    yield replace(taken, moments_on_disk=True)


def part_bytes(plan: ModelPlan, part: Part) -> int:
    """Memory of a part's matrices."""
    index, kind = part
    names = [name for stacked in matrix_names(plan.layers[index], kind).values() for name in stacked]
    return _WORD_BYTES * sum(math.prod(plan.shapes[name]) for name in names)


def streamed_bytes(plan: ModelPlan, parts: frozenset[Part]) -> int:
    """Memory of the matrices of some parts."""
    return sum(part_bytes(plan, part) for part in parts)


def divided_bytes(plan: ModelPlan, parts: frozenset[Part], world: int) -> int:
    """Memory of the matrices of some parts on the rank with the most, when each part lies on one of `world` ranks."""
    where = owners(plan, parts, world)
    return max(streamed_bytes(plan, frozenset(p for p in parts if where[p] == rank)) for rank in range(world))


def all_parts(plan: ModelPlan) -> frozenset[Part]:
    """Both parts of every layer."""
    return frozenset((i, kind) for i in range(len(plan.layers)) for kind in _KINDS)


def buffer_bytes(plan: ModelPlan, parts: frozenset[Part]) -> int:
    """Memory of the two buffers that streamed parts of a model are read into."""
    layers = {i for i, _ in parts}
    return 2 * max((streamed_bytes(plan, frozenset(p for p in parts if p[0] == i)) for i in layers), default=0)


def visits(plan: ModelPlan, teacher: ModelPlan | None, conversion: Conversion, part: Part, *, own: bool) -> int:
    """How often a step needs a part: of the model itself (`own`), or of the teacher file."""
    index, kind = part
    again = plan.num_loops - 1
    if not own:
        return plan.num_loops
    teaches = teacher is None
    if index < min(conversion.layers):
        return 1 + again * (3 if teaches else 2)
    if kind == "ffn" and index in conversion.layers:
        return plan.num_loops if teaches else 0
    return plan.num_loops * (3 if teaches else 2)


def layers_streamed(savings: Savings, conversion: Conversion, teacher: ModelPlan | None) -> int:
    """How many layers of the model are."""
    return len({i for i, _ in savings.streamed - unused_parts(conversion, teacher)})


def describe(savings: Savings, plan: ModelPlan, teacher: ModelPlan | None, conversion: Conversion) -> str:
    """In words, for a log."""
    told = [f"{layers_streamed(savings, conversion, teacher)} of {len(plan.layers)} layers streamed"]
    if teacher is not None:
        told.append(f"{len({i for i, _ in savings.teacher_streamed})} of {len(teacher.layers)} of the teacher")
    kept = len(list(_with_activations(plan, conversion)))
    told.append(f"{len(savings.recomputed)} of {kept} layers recomputed")
    if savings.on_disk:
        told.append("best state and optimizer moments on disk" if savings.moments_on_disk else "best state on disk")
    return ", ".join(told)


def _used_parts(
    plan: ModelPlan, teacher: ModelPlan | None, conversion: Conversion
) -> Iterator[tuple[float, bool, Part]]:
    """What a visit-wise cost orders: cost, whether it is the model's own, and the part. A part that evaluations of the
    student need too comes behind one that they don't.
    """
    for i in range(len(plan.layers)):
        for kind in _KINDS:
            count = visits(plan, teacher, conversion, (i, kind), own=True)
            if count:
                taught = kind == "ffn" and i in conversion.layers
                yield count + (0 if taught else 0.5), True, (i, kind)
            if teacher is not None:
                yield visits(plan, teacher, conversion, (i, kind), own=False), False, (i, kind)


def _with_activations(plan: ModelPlan, conversion: Conversion) -> Iterator[int]:
    """Layers that keep something for the backward, those whose turn comes last first: by then the others are done."""
    yield from range(min(conversion.layers) if plan.num_loops == 1 else 0, len(plan.layers))
