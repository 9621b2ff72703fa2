"""A model's frozen weights in f32, laid out once as the products want them; parts of layers may stay in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.model.broadcasts import Broadcasts
from cortiq_fcd.model.layer import LayerWeights
from cortiq_fcd.model.layer_parts import Fill, Kind, LayerLoader, Part
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.ranks import Ranks
from cortiq_fcd.model.streaming import Room, Streaming


@dataclass(frozen=True)
class FrozenWeights:
    """Every tensor of the model. head [V, C] shares the embedding's memory when the model is tied.

    Where parts of layers are streamed, `layers` lacks their matrices: take the layers from `along`.
    """

    plan: ModelPlan
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    streaming: Streaming | None = None

    def along(self, order: Sequence[int | None], *, hold: bool = False) -> Iterator[LayerWeights | None]:
        """The layers in `order`, each valid until the next one is asked for; null where the number is.

        `hold`: an evaluation, which may keep what it reads as long as there is room.
        """
        if self.streaming is not None:
            return self.streaming.along(self.layers, order, hold=hold)
        return (None if i is None else self.layers[i] for i in order)

    def copy_ffn(self, index: int, gate_up: Tensor, down: Tensor) -> None:
        """Put a layer's feed-forward matrices into other tensors."""
        if self.streaming is not None and (index, "ffn") in self.streaming.parts:
            self.streaming.fill_ffn(index, gate_up, down)
        else:
            gate_up.copy_(self.layers[index].gate_up)
            down.copy_(self.layers[index].down)

    def any_rank(self, wanted: bool) -> bool:
        """Whether another pass over the layers is wanted: by this rank, or by any that must make the same passes."""
        return wanted if self.streaming is None else self.streaming.source.any_rank(wanted)

    def release(self) -> None:
        """Let go of what evaluations have held."""
        if self.streaming is not None:
            self.streaming.release()


def load_weights(
    plan: ModelPlan,
    fill: Fill | None,
    device: torch.device,
    streamed: frozenset[Part] = frozenset(),
    room: Room | None = None,
    divided: Ranks | None = None,
) -> FrozenWeights:
    """Read every tensor that the plan names, one at a time, straight to its place on the device.

    `fill` null: weights of 0. `streamed`: parts of layers that are not read now but whenever they are visited; `room`:
    where evaluations may hold some of them. `divided`: all other parts lie on these ranks, each on one.
    """
    source = None
    if divided is not None and fill is not None:
        kinds: tuple[Kind, Kind] = ("mixer", "ffn")
        parts = frozenset((i, kind) for i in range(len(plan.layers)) for kind in kinds)
        source, streamed = Broadcasts(plan, fill, device, parts - streamed, divided), parts
    loader = LayerLoader(plan, fill, device)
    embed = loader.one(plan.embed)
    head = embed if plan.tied else loader.one(plan.head)
    return FrozenWeights(
        plan=plan,
        embed=embed,
        layers=tuple(
            loader.layer(layer, frozenset(kind for at, kind in streamed if at == i))
            for i, layer in enumerate(plan.layers)
        ),
        final_norm=loader.one(plan.final_norm),
        # Rows past the vocabulary are padding: they must not take part in the softmax.
        head=head if len(head) == plan.vocab_size else head[: plan.vocab_size],
        streaming=Streaming(plan, fill, device, streamed, room, source) if fill is not None and streamed else None,
    )


def filled_by(read: Callable[[str], Tensor]) -> Fill:
    """A `Fill` that copies what `read` gives for a name."""

    def fill(name: str, out: Tensor) -> None:
        out.copy_(read(name))

    return fill
