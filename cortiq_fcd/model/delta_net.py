"""The GatedDeltaNet mixer of a layer, forward and backward. All its weights are frozen.

streams = n Win^T (qkv, z, a, b in one stacked product);  y = gated_delta_net(streams) Wout^T
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels import gated_delta_net
from cortiq_fcd.kernels.gated_delta_net import Parameters, State, Streams
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_fwd
from cortiq_fcd.model.mixers import DeltaNetPlan

Saved = gated_delta_net.Saved


@dataclass(frozen=True)
class DeltaNetWeights:
    """in_proj [channels + G R Dv + 2 G R, C], rows in the order qkv, z, a, b; out_proj [C, G R Dv]."""

    plan: DeltaNetPlan
    in_proj: Tensor
    parameters: Parameters
    out_proj: Tensor


def delta_net_fwd(n: Tensor, weights: DeltaNetWeights, batch: int) -> tuple[Tensor, State, Saved]:
    """y [N, C] of n [N, C], the state after the last position, and what the backward needs."""
    streams = _streams(linear_fwd(n, weights.in_proj).view(batch, -1, weights.in_proj.shape[0]), weights)
    mixed, state, saved = gated_delta_net.gated_delta_net_fwd(streams, weights.parameters)
    return linear_fwd(mixed.view(n.shape[0], -1), weights.out_proj), state, saved


def delta_net_bwd(dy: Tensor, saved: Saved, weights: DeltaNetWeights) -> Tensor:
    """dn [N, C] for dy [N, C]."""
    batch = saved.gate_in.shape[0]
    dmixed = linear_bwd_input(dy, weights.out_proj).view(batch, -1, weights.out_proj.shape[1])
    grads = gated_delta_net.gated_delta_net_bwd(dmixed, saved)
    rows = torch.cat((grads.qkv, grads.z, grads.a, grads.b), -1)
    return linear_bwd_input(rows.view(dy.shape[0], -1), weights.in_proj)


def delta_net_step(n: Tensor, state: State, weights: DeltaNetWeights) -> Tensor:
    """y [B, C] of one more position n [B, C]; the state moves on."""
    streams = _streams(linear_fwd(n, weights.in_proj), weights)
    return linear_fwd(gated_delta_net.gated_delta_net_step(streams, state, weights.parameters), weights.out_proj)


def _streams(rows: Tensor, weights: DeltaNetWeights) -> Streams:
    plan = weights.plan
    channels = 2 * plan.key_heads * plan.key_dim + plan.value_heads * plan.value_dim
    sizes = [channels, plan.value_heads * plan.value_dim, plan.value_heads, plan.value_heads]
    return Streams(*torch.split(rows, sizes, dim=-1))
