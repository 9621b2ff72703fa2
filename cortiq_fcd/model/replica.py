"""The whole network, twice: the teacher (frozen weights, exact attention) and the student (masters, O(1) attention).

Both share every frozen tensor and, up to the first layer where they differ, the forward itself (unless the teacher is a
file of its own). Masters and gradients are one flat buffer each, with a view per tensor: optimizer, best state and clip
are then one pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.kernels import rmsnorm
from cortiq_fcd.kernels.ce_kl import ce_kl
from cortiq_fcd.kernels.rope import rotation
from cortiq_fcd.model.attention import Angles, O1Attention
from cortiq_fcd.model.clock import Clock
from cortiq_fcd.model.conversion import Conversion, is_exact, landmark_count
from cortiq_fcd.model.elements import CERTIFIED, Elements, StepLoss
from cortiq_fcd.model.layer import LayerSaved, Trainable, embed, layer_bwd, layer_fwd, wild_rows
from cortiq_fcd.model.matching import match_layers
from cortiq_fcd.model.mixers import AttentionPlan
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.recompute import Recomputed
from cortiq_fcd.model.weights import FrozenWeights

Kept: TypeAlias = LayerSaved | Recomputed | rmsnorm.Saved
"""What a visit leaves for the backward."""


def _nothing(layer: int) -> None:
    pass


@dataclass(frozen=True)
class Masters:
    """Master copies of the trainable tensors: one flat f32 buffer, and the same numbers by layer and by tensor name.

    `padded` is the buffer with zeros behind it, so that it can be cut into equal parts.
    """

    padded: Tensor
    flat: Tensor
    layers: Mapping[int, Trainable]
    named: Mapping[str, Tensor]


@dataclass(frozen=True)
class Replica:
    """Teacher and student. `masters` and `gradient` are the only tensors that ever change.

    `teacher` is `weights` itself unless a teacher file was given.
    """

    weights: FrozenWeights
    teacher: FrozenWeights
    conversion: Conversion
    masters: Masters
    gradient: Masters
    clock: Clock = field(default_factory=Clock)
    recomputed: frozenset[int] = frozenset()  # layers whose activations are computed again instead of kept

    @property
    def student(self) -> FrozenWeights:
        """The weights with the trained tensors replaced by their masters."""
        layers, streaming = list(self.weights.layers), self.weights.streaming
        for i, own in self.masters.layers.items():
            layers[i] = replace(
                layers[i], input_norm=own.input_norm, post_norm=own.post_norm, gate_up=own.gate_up, down=own.down
            )
        if streaming is not None:
            streaming = streaming.without(frozenset((i, "ffn") for i in self.masters.layers))
        return replace(self.weights, layers=tuple(layers), streaming=streaming)

    def o1(self, seal: int, tokens: int, gain_limit: float = math.inf) -> O1Attention | None:
        """The O(1) kernel for windows of `tokens` sealed after `seal`; null when such windows stay exact."""
        c = self.conversion
        if seal >= tokens or is_exact(seal, c.w, c.sink):
            return None
        return O1Attention(seal, landmark_count(seal, c.m), c.w, c.sink, gain_limit)


def new_replica(
    weights: FrozenWeights,
    conversion: Conversion,
    teacher: FrozenWeights | None = None,
    recomputed: frozenset[int] = frozenset(),
    *,
    parts: int = 1,
    in_place: bool = False,
) -> Replica:
    """A replica whose masters start as the frozen weights; its flat buffers can be cut into `parts` equal ones.

    `in_place`: the gradient is written over the masters, of which somebody else must have copies, where it can be: a
    looped model needs its weights again.
    """
    masters = _flat_views(weights, conversion.layers, parts)
    in_place = in_place and weights.plan.num_loops == 1
    gradient = masters if in_place else _flat_views(weights, conversion.layers, parts)
    replica = Replica(weights, teacher or weights, conversion, masters, gradient, recomputed=recomputed)
    reset_masters(replica)
    return replica


def reset_masters(replica: Replica) -> None:
    """Put the frozen weights back into the masters."""
    for i, own in replica.masters.layers.items():
        frozen = replica.weights.layers[i]
        own.input_norm.copy_(frozen.input_norm)
        own.post_norm.copy_(frozen.post_norm)
        replica.weights.copy_ffn(i, own.gate_up, own.down)


def _flat_views(weights: FrozenWeights, trained: tuple[int, ...], parts: int) -> Masters:
    """A flat buffer with room for the trainable tensors of the given layers, in the recipe's order."""
    shapes = {i: _trainable_shapes(weights.plan, i) for i in trained}
    numbers = [math.prod(shape) for own_shapes in shapes.values() for shape in own_shapes]
    padded = weights.embed.new_zeros(-(-sum(numbers) // parts) * parts)
    flat = padded[: sum(numbers)]
    pieces = iter(torch.split(flat, numbers))
    layers: dict[int, Trainable] = {}
    named: dict[str, Tensor] = {}
    for i, own_shapes in shapes.items():
        own = Trainable(*(next(pieces).view(shape) for shape in own_shapes))
        layers[i] = own
        gate, up = own.gate_up.chunk(2)
        values = (own.input_norm, own.post_norm, gate, up, own.down)
        named.update(zip(weights.plan.layers[i].trainable, values, strict=True))
    return Masters(padded, flat, layers, named)


def _trainable_shapes(plan: ModelPlan, index: int) -> list[tuple[int, ...]]:
    """Shapes of a layer's `Trainable`."""
    input_norm, post_norm, gate, up, down = (plan.shapes[name] for name in plan.layers[index].trainable)
    return [input_norm, post_norm, (gate[0] + up[0], gate[1]), down]


def rotations(weights: FrozenWeights, positions: int) -> Angles:
    """The rotations of every rotary plan of the model, for positions 0 .. positions - 1."""
    plans = {layer.mixer.rotary for layer in weights.plan.layers if isinstance(layer.mixer, AttentionPlan)}
    return {plan: rotation(positions, plan.frequencies, plan.magnitude, like=weights.embed) for plan in plans}


def visits(plan: ModelPlan) -> Iterator[int | None]:
    """Layer numbers in the order in which they run; null is the final norm between two loops of a looped model."""
    for loop in range(plan.num_loops):
        if loop and plan.loop_norm:
            yield None
        yield from range(len(plan.layers))


def final_norm(x: Tensor, weights: FrozenWeights) -> tuple[Tensor, rmsnorm.Saved]:
    """The norm of rows [N, C] before the head (and between loops)."""
    return rmsnorm.rmsnorm_fwd(x, weights.final_norm, weights.plan.norm.eps, plus_one=weights.plan.norm.plus_one)


def head_rows(x: Tensor, weights: FrozenWeights) -> Tensor:
    """What the head multiplies: the normalised rows, times the model's logit multiplier."""
    rows, _ = final_norm(x, weights)
    multiplier = weights.plan.logit_multiplier
    return rows if multiplier == 1 else rows.mul_(multiplier)


def hidden_states(replica: Replica, ids: Tensor, *, student: bool, seal: int | None = None) -> Tensor:
    """What the head multiplies, [B * T, C], for ids [B, T].

    The teacher runs its frozen weights with exact attention. The student runs the masters; its converted layers run the
    O(1) kernel sealed after `seal` tokens (null: exact attention everywhere).
    """
    return next(hidden_batches(replica, [ids], student=student, seal=seal))


def hidden_batches(
    replica: Replica, batches: Sequence[Tensor], *, student: bool, seal: int | None = None
) -> Iterator[Tensor]:
    """`hidden_states` of several ids [B, T], T being the same, with one pass over the layers for all of them."""
    weights = replica.student if student else replica.teacher
    positions = batches[0].shape[1]
    o1 = replica.o1(seal, positions) if student and seal is not None else None
    angles = rotations(weights, positions)
    xs = [embed(ids, weights.embed, weights.plan.embed_multiplier) for ids in batches]
    order = list(visits(weights.plan))
    for i, layer in zip(order, weights.along(order, hold=True), strict=True):
        for k, ids in enumerate(batches):
            if layer is None:
                xs[k] = final_norm(xs[k], weights)[0]
            else:
                here = o1 if i in replica.conversion.converted else None
                xs[k] = layer_fwd(xs[k], layer, angles, ids.shape[0], here)[0]
    xs.reverse()
    while xs:
        yield head_rows(xs.pop(), weights)


def run_visits(
    x: Tensor,
    weights: FrozenWeights,
    order: list[int | None],
    ids: Tensor,
    o1: O1Attention | None,
    converted: tuple[int, ...],
    saved: list[Kept] | None = None,
    recomputed: frozenset[int] = frozenset(),
    outputs: list[Tensor] | None = None,
    wild: list[Tensor] | None = None,
) -> Tensor:
    """Rows [B * T, C] after the visits in `order`. What the backward of each visit needs is appended to `saved`, its
    rows to `outputs`, and how many rows of an O(1) kernel are wild to `wild`, where these are given.
    """
    angles = rotations(weights, ids.shape[1])
    for i, layer in zip(order, weights.along(order), strict=True):
        if layer is None:
            x, norm_saved = final_norm(x, weights)
            if saved is not None:
                saved.append(norm_saved)
            if outputs is not None:
                outputs.append(x)
            continue
        here = o1 if i in converted else None
        y, layer_saved = layer_fwd(x, layer, angles, ids.shape[0], here)
        if saved is not None:
            saved.append(Recomputed(x, ids.shape[0], here) if i in recomputed else layer_saved)
        if wild is not None and here is not None:
            wild.append(wild_rows(layer_saved))
        del layer_saved  # or it would live on while the next layer runs
        x = y
        if outputs is not None:
            outputs.append(x)
    return x


def loss_and_gradient(
    replica: Replica,
    ids: Tensor,
    targets: Tensor,
    kl_weight: float,
    layer_done: Callable[[int], None] = _nothing,
    elements: Elements = CERTIFIED,
) -> StepLoss:
    """Loss of the student against targets and teacher over windows ids [B, T]; `replica.gradient` is overwritten.

    `layer_done` is called for each trained layer, from the top down, as soon as its gradient is final. `elements`: what
    the recipe adds.
    """
    student, teacher = replica.student, replica.teacher
    student.release()
    teacher.release()
    # What lies below the first trained layer needs no backward; a teacher that is the same model shares it.
    order, below = list(visits(student.plan)), min(replica.conversion.layers)
    converted = replica.conversion.converted
    clock = replica.clock
    exact: list[Tensor] | None = [] if elements.match else None
    outputs: list[Tensor] | None = [] if elements.match else None
    with clock("shared"):
        x = embed(ids, student.embed, student.plan.embed_multiplier)
        x = run_visits(x, student, order[:below], ids, None, ())
    with clock("teacher"):
        if teacher is replica.weights:
            teacher_x = run_visits(x, teacher, order[below:], ids, None, (), outputs=exact)
        else:
            teacher_x = embed(ids, teacher.embed, teacher.plan.embed_multiplier)
            teacher_x = run_visits(teacher_x, teacher, list(visits(teacher.plan))[:below], ids, None, ())
            teacher_x = run_visits(teacher_x, teacher, list(visits(teacher.plan))[below:], ids, None, (), outputs=exact)
        teacher_rows = head_rows(teacher_x, teacher)
        del teacher_x

    saved: list[Kept] = []
    wild: list[Tensor] = []
    seal = replica.conversion.seal if elements.seal is None else elements.seal
    o1 = replica.o1(seal, ids.shape[1], elements.gain_limit)
    with clock("student"):
        x = run_visits(x, student, order[below:], ids, o1, converted, saved, replica.recomputed, outputs, wild)
        rows, norm_saved = final_norm(x, student)
        multiplier = student.plan.logit_multiplier
    with clock("head"):
        loss = ce_kl(
            rows.mul_(multiplier) if multiplier != 1 else rows,
            teacher_rows,
            student.head,
            targets.reshape(-1),
            kl_weight,
            teacher_head=None if teacher.head is student.head else teacher.head,
            softcap=student.plan.logit_softcap,
            teacher_softcap=teacher.plan.logit_softcap,
            temperature=elements.temperature,
        )
    trained = [visit for visit, i in enumerate(order[below:]) if i in replica.conversion.layers]
    match, dys = match_layers(outputs, exact, trained, elements.match) if outputs and exact else (0.0, {})
    with clock("backprop"):
        dx = rmsnorm.rmsnorm_bwd(loss.dhidden * multiplier, norm_saved).dx
        _backward(dx, replica, student, order[below:], ids.shape[1], saved, layer_done, dys)
    return StepLoss(loss.ce, loss.kl, match, sum(int(count) for count in wild))


def _backward(
    dx: Tensor,
    replica: Replica,
    student: FrozenWeights,
    order: list[int | None],
    positions: int,
    saved: list[Kept],
    layer_done: Callable[[int], None],
    dys: dict[int, Tensor],
) -> None:
    """Fill `replica.gradient` from the gradient of the last layer's output. `saved` is emptied; so is `dys`, further
    gradients of the outputs of visits.
    """
    angles = rotations(student, positions)
    seen: set[int] = set()
    backwards = order[::-1]
    for visit, (i, layer) in enumerate(zip(backwards, student.along(backwards), strict=True)):
        # Popping frees a layer's activations as soon as they have been used.
        part = saved.pop()
        if (dy := dys.pop(len(saved), None)) is not None:
            dx = dx.add_(dy)
        if i is None or layer is None or isinstance(part, rmsnorm.Saved):
            assert isinstance(part, rmsnorm.Saved)
            dx = rmsnorm.rmsnorm_bwd(dx, part).dx
            continue
        if isinstance(part, Recomputed):
            with replica.clock("recompute"):
                part = part.saved(layer, angles)
        grads = replica.gradient.layers.get(i)
        if grads is not None and i in seen:
            # A looped model visits a layer again: its gradients add up.
            again = Trainable(*(torch.empty_like(t) for t in grads))
            dx = layer_bwd(dx, part, layer, angles, again)
            for total, more in zip(grads, again, strict=True):
                total.add_(more)
        else:
            dx = layer_bwd(dx, part, layer, angles, grads)
        seen.add(i)
        if grads is not None and i not in backwards[visit + 1 :]:
            layer_done(i)
