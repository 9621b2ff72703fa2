"""The whole network, twice: the teacher (frozen weights, exact attention) and the student (masters, O(1) attention).

Both share every frozen tensor and, up to the first layer where they differ, the forward itself. Masters and gradients
are one flat buffer each, with a view per tensor: optimizer, best state and clip are then one pass over memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cortiq_fcd.kernels import o1_attention, rmsnorm
from cortiq_fcd.kernels.ce_kl import Loss, ce_kl
from cortiq_fcd.kernels.rope import Rotation, rotation
from cortiq_fcd.model.conversion import Conversion, is_exact, landmark_count
from cortiq_fcd.model.layer import (
    LayerSaved,
    LayerWeights,
    O1Attention,
    Trainable,
    embed,
    layer_bwd,
    layer_fwd,
)
from cortiq_fcd.model.weights import FrozenWeights


@dataclass(frozen=True)
class Masters:
    """Master copies of the trainable tensors: one flat buffer, and the same numbers by layer and by tensor name."""

    flat: Tensor
    layers: Mapping[int, Trainable]
    named: Mapping[str, Tensor]


@dataclass(frozen=True)
class Replica:
    """Teacher and student. `masters` and `gradient` are the only tensors that ever change."""

    weights: FrozenWeights
    conversion: Conversion
    masters: Masters
    gradient: Masters

    @property
    def first_difference(self) -> int:
        """Lowest layer that is converted or trained: below it teacher and student are one forward."""
        return min(self.conversion.layers)

    @property
    def student_layers(self) -> tuple[LayerWeights, ...]:
        """The frozen layers with the trained tensors replaced by their masters."""
        return tuple(
            layer
            if (own := self.masters.layers.get(i)) is None
            else replace(layer, input_norm=own.input_norm, post_norm=own.post_norm, gate_up=own.gate_up, down=own.down)
            for i, layer in enumerate(self.weights.layers)
        )

    def o1(self, seal: int, tokens: int) -> O1Attention | None:
        """The O(1) kernel for windows of `tokens` sealed after `seal`; null when such windows stay exact."""
        c = self.conversion
        if seal >= tokens or is_exact(seal, c.w, c.sink):
            return None
        geometry = o1_attention.Geometry(seal, c.w, c.sink, self.weights.shape.scale)
        return O1Attention(landmark_count(seal, c.m), geometry)

    def rotation(self, positions: int) -> Rotation:
        """Rotary angles of positions 0 .. positions - 1."""
        plan = self.weights.plan
        return rotation(positions, plan.rotary_dim, plan.rope_theta, like=self.weights.embed)


def new_replica(weights: FrozenWeights, conversion: Conversion) -> Replica:
    """A replica whose masters start as the frozen weights."""
    masters, gradient = (_flat_views(weights, conversion.layers) for _ in range(2))
    replica = Replica(weights, conversion, masters, gradient)
    reset_masters(replica)
    return replica


def reset_masters(replica: Replica) -> None:
    """Put the frozen weights back into the masters."""
    for i, own in replica.masters.layers.items():
        frozen = replica.weights.layers[i]
        own.input_norm.copy_(frozen.input_norm)
        own.post_norm.copy_(frozen.post_norm)
        own.gate_up.copy_(frozen.gate_up)
        own.down.copy_(frozen.down)


def _flat_views(weights: FrozenWeights, trained: tuple[int, ...]) -> Masters:
    """A flat buffer with room for the trainable tensors of the given layers, in the recipe's order."""
    sizes = {i: [(layer := weights.layers[i]).input_norm, layer.post_norm, layer.gate_up, layer.down] for i in trained}
    flat = weights.embed.new_zeros(sum(t.numel() for parts in sizes.values() for t in parts))
    pieces = iter(torch.split(flat, [t.numel() for parts in sizes.values() for t in parts]))
    layers: dict[int, Trainable] = {}
    named: dict[str, Tensor] = {}
    for i, parts in sizes.items():
        own = Trainable(*(next(pieces).view(t.shape) for t in parts))
        layers[i] = own
        gate, up = own.gate_up.chunk(2)
        values = (own.input_norm, own.post_norm, gate, up, own.down)
        named.update(zip(weights.plan.layers[i].trainable, values, strict=True))
    return Masters(flat, layers, named)


def hidden_states(replica: Replica, ids: Tensor, *, student: bool, seal: int | None = None) -> Tensor:
    """Final normalised hidden rows [B * T, C] of ids [B, T].

    The teacher runs the frozen weights with exact attention. The student runs the masters; its converted layers run the
    O(1) kernel sealed after `seal` tokens (null: exact attention everywhere).
    """
    layers = replica.student_layers if student else replica.weights.layers
    o1 = replica.o1(seal, ids.shape[1]) if student and seal is not None else None
    angles = replica.rotation(ids.shape[1])
    x = embed(ids, replica.weights.embed)
    for i, layer in enumerate(layers):
        attention = o1 if i in replica.conversion.layers else None
        x, _ = layer_fwd(x, layer, replica.weights.shape, angles, ids.shape[0], attention)
    return final_norm(replica, x)[0]


def final_norm(replica: Replica, x: Tensor) -> tuple[Tensor, rmsnorm.Saved]:
    """The norm before the head, rows [N, C]."""
    shape = replica.weights.shape
    return rmsnorm.rmsnorm_fwd(x, replica.weights.final_norm, shape.norm_eps, plus_one=shape.norm_plus_one)


def loss_and_gradient(replica: Replica, ids: Tensor, targets: Tensor, kl_weight: float) -> Loss:
    """Loss of the student against targets and teacher over windows ids [B, T]; `replica.gradient` is overwritten."""
    batch, T = ids.shape
    shape, angles = replica.weights.shape, replica.rotation(T)
    shared = replica.first_difference
    x = embed(ids, replica.weights.embed)
    for layer in replica.weights.layers[:shared]:
        x, _ = layer_fwd(x, layer, shape, angles, batch, None)
    teacher_x = x
    for layer in replica.weights.layers[shared:]:
        teacher_x, _ = layer_fwd(teacher_x, layer, shape, angles, batch, None)
    teacher, _ = final_norm(replica, teacher_x)
    del teacher_x

    o1 = replica.o1(replica.conversion.seal, T)
    layers = replica.student_layers
    saved: list[LayerSaved] = []
    for i in range(shared, len(layers)):
        x, layer_saved = layer_fwd(x, layers[i], shape, angles, batch, o1 if i in replica.conversion.layers else None)
        saved.append(layer_saved)
    student, norm_saved = final_norm(replica, x)
    loss = ce_kl(student, teacher, replica.weights.head, targets.reshape(-1), kl_weight)

    dx = rmsnorm.rmsnorm_bwd(loss.dhidden, norm_saved).dx
    for i in reversed(range(shared, len(layers))):
        # Popping frees a layer's activations as soon as they have been used.
        dx = layer_bwd(dx, saved.pop(), layers[i], angles, replica.gradient.layers.get(i))
    return loss
