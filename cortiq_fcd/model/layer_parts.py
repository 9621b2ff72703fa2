"""The two parts of a layer, mixer and feed-forward, and how they are read: the large matrices of a part can stay in the
file until they are needed, everything small (norms, biases, convolutions) is always in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cortiq_fcd.kernels.gated_delta_net import Parameters
from cortiq_fcd.model.attention import AttentionWeights
from cortiq_fcd.model.delta_net import DeltaNetWeights
from cortiq_fcd.model.layer import LayerWeights, MixerWeights
from cortiq_fcd.model.mixers import AttentionPlan, DeltaNetPlan
from cortiq_fcd.model.plan import LayerPlan, ModelPlan

Fill: TypeAlias = Callable[[str, Tensor], None]
"""Name of a tensor, and an f32 tensor of its shape that its values go into."""

Kind: TypeAlias = Literal["mixer", "ffn"]
Part: TypeAlias = tuple[int, Kind]
"""A part of a layer, by the layer's number."""

Matrices: TypeAlias = dict[str, Tensor]
"""The large matrices of a part, by the name of their field."""

# Matrices begin at multiples of 64 bytes, as torch's own do: products could round differently otherwise.
ALIGN = 16


def matrix_names(layer: LayerPlan, kind: Kind) -> dict[str, tuple[str, ...]]:
    """Tensors of the file, by the field of the part in which they are stacked, one below the other."""
    if kind == "ffn":
        return {"gate_up": (layer.gate_proj, layer.up_proj), "down": (layer.down_proj,)}
    mixer = layer.mixer
    if isinstance(mixer, DeltaNetPlan):
        return {"in_proj": mixer.in_proj, "out_proj": (mixer.out_proj,)}
    gate = {} if mixer.g_proj is None else {"gate": (mixer.g_proj,)}
    return {"qkv": (mixer.q_proj, mixer.k_proj, mixer.v_proj), **gate, "o": (mixer.o_proj,)}


def part_numbers(plan: ModelPlan, part: Part) -> int:
    """How many numbers the matrices of a part take in one buffer."""
    index, kind = part
    return sum(_aligned(math.prod(_stacked_shape(plan, names))) for names in _names(plan, index, kind).values())


def part_matrices(plan: ModelPlan, part: Part, buffer: Tensor) -> Matrices:
    """The beginning of a flat buffer, as the matrices of a part."""
    index, kind = part
    matrices: Matrices = {}
    at = 0
    for field, names in _names(plan, index, kind).items():
        shape = _stacked_shape(plan, names)
        matrices[field] = buffer[at : at + math.prod(shape)].view(shape)
        at += _aligned(math.prod(shape))
    return matrices


def read_part(plan: ModelPlan, fill: Fill, part: Part, buffer: Tensor) -> Matrices:
    """The matrices of a part, read into the beginning of a flat buffer."""
    index, kind = part
    matrices = part_matrices(plan, part, buffer)
    for field, names in _names(plan, index, kind).items():
        fill_stacked(plan, fill, names, matrices[field])
    return matrices


def with_matrices(layer: LayerWeights, mixer: Mapping[str, Any], ffn: Mapping[str, Any]) -> LayerWeights:
    """The layer with these matrices in place of its own."""
    return replace(layer, mixer=replace(layer.mixer, **mixer), **ffn) if mixer or ffn else layer


def fill_stacked(plan: ModelPlan, fill: Fill, names: tuple[str, ...], out: Tensor) -> None:
    """Read matrices with the same number of columns into `out`, one below the other."""
    for part, name in zip(torch.split(out, [plan.shapes[name][0] for name in names]), names, strict=True):
        fill(name, part)


class LayerLoader:
    """Reads layers to the device; the matrices of streamed parts are left out (they are empty). `fill` null: zeros."""

    def __init__(self, plan: ModelPlan, fill: Fill | None, device: torch.device) -> None:
        self._plan, self._fill, self._device = plan, fill, device

    def one(self, name: str) -> Tensor:
        """A tensor as it is."""
        tensor = self._new(self._plan.shapes[name])
        if self._fill is not None:
            self._fill(name, tensor)
        return tensor

    def layer(self, layer: LayerPlan, streamed: frozenset[Kind]) -> LayerWeights:
        """A layer without the matrices of its streamed parts."""
        ffn = self._matrices(layer, "ffn", streamed)
        return LayerWeights(
            norm=self._plan.norm,
            input_norm=self.one(layer.input_norm),
            mixer=self._mixer(layer.mixer, self._matrices(layer, "mixer", streamed)),
            post_norm=self.one(layer.post_norm),
            gate_up=ffn["gate_up"],
            down=ffn["down"],
        )

    def _mixer(self, plan: AttentionPlan | DeltaNetPlan, matrices: Matrices) -> MixerWeights:
        if isinstance(plan, DeltaNetPlan):
            return self._delta_net(plan, matrices)
        return AttentionWeights(
            plan=plan,
            norm=self._plan.norm,
            qkv=matrices["qkv"],
            qkv_bias=self._stacked_biases(plan),
            q_norm=self._maybe(plan.q_norm),
            k_norm=self._maybe(plan.k_norm),
            gate=matrices.get("gate"),
            o=matrices["o"],
            o_bias=self._maybe(plan.o_bias),
        )

    def _delta_net(self, plan: DeltaNetPlan, matrices: Matrices) -> DeltaNetWeights:
        parameters = Parameters(
            conv=self.one(plan.conv).view(-1, plan.taps),
            A_log=self.one(plan.A_log),
            dt_bias=self.one(plan.dt_bias),
            norm=self.one(plan.norm),
            norm_eps=self._plan.norm.eps,
            key_heads=plan.key_heads,
            key_dim=plan.key_dim,
            value_dim=plan.value_dim,
        )
        return DeltaNetWeights(plan, matrices["in_proj"], parameters, matrices["out_proj"])

    def _matrices(self, layer: LayerPlan, kind: Kind, streamed: frozenset[Kind]) -> Matrices:
        names = matrix_names(layer, kind)
        if kind in streamed:
            return {field: self._new((0, 0)) for field in names}
        return {field: self._stacked(parts) for field, parts in names.items()}

    def _stacked(self, names: tuple[str, ...]) -> Tensor:
        matrix = self._new(_stacked_shape(self._plan, names))
        if self._fill is not None:
            fill_stacked(self._plan, self._fill, names, matrix)
        return matrix

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        if self._fill is not None:
            return torch.empty(shape, device=self._device)
        # The system hands out zeros without allocating them, until they are written.
        return torch.from_numpy(np.zeros(shape, np.float32)).to(self._device)

    def _maybe(self, name: str | None) -> Tensor | None:
        return None if name is None else self.one(name)

    def _stacked_biases(self, plan: AttentionPlan) -> Tensor | None:
        """The bias of the stacked q, k, v product; a missing one is zero. None when all three are missing."""
        pairs = ((plan.q_proj, plan.q_bias), (plan.k_proj, plan.k_bias), (plan.v_proj, plan.v_bias))
        if not any(bias for _, bias in pairs):
            return None
        rows = {matrix: self._plan.shapes[matrix][0] for matrix, _ in pairs}
        parts = [self.one(bias) if bias else torch.zeros(rows[matrix], device=self._device) for matrix, bias in pairs]
        return torch.cat(parts)


def _names(plan: ModelPlan, index: int, kind: Kind) -> dict[str, tuple[str, ...]]:
    return matrix_names(plan.layers[index], kind)


def _stacked_shape(plan: ModelPlan, names: tuple[str, ...]) -> tuple[int, int]:
    return sum(plan.shapes[name][0] for name in names), plan.shapes[names[0]][1]


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN
