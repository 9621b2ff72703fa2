"""A model's frozen weights in f32, laid out once as the products want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.gated_delta_net import Parameters
from cortiq_fcd.model.attention import AttentionWeights
from cortiq_fcd.model.delta_net import DeltaNetWeights
from cortiq_fcd.model.layer import LayerWeights, MixerWeights
from cortiq_fcd.model.mixers import AttentionPlan, DeltaNetPlan
from cortiq_fcd.model.plan import LayerPlan, ModelPlan

Read = Callable[[str], Tensor]
"""Name of a tensor -> its f32 values on the CPU."""


@dataclass(frozen=True)
class FrozenWeights:
    """Every tensor of the model. head [V, C] shares the embedding's memory when the model is tied."""

    plan: ModelPlan
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def load_weights(plan: ModelPlan, read: Read, device: torch.device) -> FrozenWeights:
    """Read every tensor that the plan names, one at a time, straight to its place on the device."""
    loader = _Loader(plan, read, device)
    embed = loader.one(plan.embed)
    head = embed if plan.tied else loader.one(plan.head)
    return FrozenWeights(
        plan=plan,
        embed=embed,
        layers=tuple(loader.layer(layer) for layer in plan.layers),
        final_norm=loader.one(plan.final_norm),
        # Rows past the vocabulary are padding: they must not take part in the softmax.
        head=head if len(head) == plan.vocab_size else head[: plan.vocab_size],
    )


class _Loader:
    def __init__(self, plan: ModelPlan, read: Read, device: torch.device) -> None:
        self._plan, self._read, self._device = plan, read, device

    def one(self, name: str) -> Tensor:
        return self._read(name).to(self._device)

    def maybe(self, name: str | None) -> Tensor | None:
        return None if name is None else self.one(name)

    def layer(self, layer: LayerPlan) -> LayerWeights:
        return LayerWeights(
            norm=self._plan.norm,
            input_norm=self.one(layer.input_norm),
            mixer=self.mixer(layer.mixer),
            post_norm=self.one(layer.post_norm),
            gate_up=self.stacked((layer.gate_proj, layer.up_proj)),
            down=self.one(layer.down_proj),
        )

    def mixer(self, plan: AttentionPlan | DeltaNetPlan) -> MixerWeights:
        if isinstance(plan, DeltaNetPlan):
            return self.delta_net(plan)
        return AttentionWeights(
            plan=plan,
            norm=self._plan.norm,
            qkv=self.stacked((plan.q_proj, plan.k_proj, plan.v_proj)),
            qkv_bias=self.stacked_biases(plan),
            q_norm=self.maybe(plan.q_norm),
            k_norm=self.maybe(plan.k_norm),
            gate=self.maybe(plan.g_proj),
            o=self.one(plan.o_proj),
            o_bias=self.maybe(plan.o_bias),
        )

    def delta_net(self, plan: DeltaNetPlan) -> DeltaNetWeights:
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
        return DeltaNetWeights(plan, self.stacked(plan.in_proj), parameters, self.one(plan.out_proj))

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Matrices with the same number of columns, one below the other."""
        rows = [self._plan.shapes[name][0] for name in names]
        stacked = torch.empty(sum(rows), self._plan.shapes[names[0]][1], device=self._device)
        for part, name in zip(torch.split(stacked, rows), names, strict=True):
            part.copy_(self._read(name))
        return stacked

    def stacked_biases(self, plan: AttentionPlan) -> Tensor | None:
        """The bias of the stacked q, k, v product; a missing one is zero. None when all three are missing."""
        pairs = ((plan.q_proj, plan.q_bias), (plan.k_proj, plan.k_bias), (plan.v_proj, plan.v_bias))
        if not any(bias for _, bias in pairs):
            return None
        parts = [self._read(bias) if bias else torch.zeros(self._plan.shapes[matrix][0]) for matrix, bias in pairs]
        return torch.cat(parts).to(self._device)
