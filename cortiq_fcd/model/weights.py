"""A model's frozen weights in f32, laid out once as the products want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.model.layer import LayerShape, LayerWeights
from cortiq_fcd.model.plan import LayerPlan, ModelPlan

Read = Callable[[str], Tensor]
"""Name of a tensor -> its f32 values on the CPU."""


@dataclass(frozen=True)
class FrozenWeights:
    """Every tensor of the model. embed and head [V, C] are one tensor when the model is tied."""

    plan: ModelPlan
    shape: LayerShape
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def load_weights(plan: ModelPlan, read: Read, device: torch.device) -> FrozenWeights:
    """Read every tensor that the plan names, one at a time, straight to its place on the device."""

    def one(name: str) -> Tensor:
        return read(name).to(device)

    def maybe(name: str | None) -> Tensor | None:
        return None if name is None else one(name)

    embed = one(plan.embed)
    return FrozenWeights(
        plan=plan,
        shape=LayerShape(plan.heads, plan.kv_heads, plan.head_dim, plan.norm_eps, plan.norm_plus_one),
        embed=embed,
        layers=tuple(
            LayerWeights(
                input_norm=one(layer.input_norm),
                qkv=_stacked(plan, read, (layer.q_proj, layer.k_proj, layer.v_proj), device),
                qkv_bias=_stacked_biases(plan, read, layer, device),
                q_norm=maybe(layer.q_norm),
                k_norm=maybe(layer.k_norm),
                o=one(layer.o_proj),
                o_bias=maybe(layer.o_bias),
                post_norm=one(layer.post_norm),
                gate_up=_stacked(plan, read, (layer.gate_proj, layer.up_proj), device),
                down=one(layer.down_proj),
            )
            for layer in plan.layers
        ),
        final_norm=one(plan.final_norm),
        head=embed if plan.tied else one(plan.head),
    )


def _stacked(plan: ModelPlan, read: Read, names: tuple[str, ...], device: torch.device) -> Tensor:
    """Matrices with the same number of columns, one below the other."""
    rows = [plan.shapes[name][0] for name in names]
    stacked = torch.empty(sum(rows), plan.shapes[names[0]][1], device=device)
    for part, name in zip(torch.split(stacked, rows), names, strict=True):
        part.copy_(read(name))
    return stacked


def _stacked_biases(plan: ModelPlan, read: Read, layer: LayerPlan, device: torch.device) -> Tensor | None:
    """The bias of the stacked q, k, v product; a missing one is zero. None when all three are missing."""
    pairs = ((layer.q_proj, layer.q_bias), (layer.k_proj, layer.k_bias), (layer.v_proj, layer.v_bias))
    if not any(bias for _, bias in pairs):
        return None
    parts = [read(bias) if bias else torch.zeros(plan.shapes[matrix][0]) for matrix, bias in pairs]
    return torch.cat(parts).to(device)
