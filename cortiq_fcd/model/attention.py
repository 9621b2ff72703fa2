"""The attention mixer of a layer, forward and backward, made of kernels: exact, windowed, or O(1).

    q, k, v = n Wqkv^T (+ bias);  q, k = rope(rmsnorm(q, k));  out = attention(q, k, v) [* sigmoid(gate)];  y = out Wo^T

n, y [N, C] with N = B * T rows, b-major. q, k, v are one stacked product. All weights are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_attention, o1_attention, rmsnorm, sigmoid_gate
from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_fwd
from cortiq_fcd.kernels.rope import Rotation, rope_bwd, rope_fwd
from cortiq_fcd.model.mixers import AttentionPlan
from cortiq_fcd.model.plan import NormPlan
from cortiq_fcd.model.rotary import RotaryPlan

Angles: TypeAlias = Mapping[RotaryPlan, Rotation]
"""The rotation of every rotary plan of the model, for the positions at hand."""


@dataclass(frozen=True)
class AttentionWeights:
    """qkv [(H + 2G) D, C] (H counts twice with an interleaved gate); o [C, H D]; gate [H or H D, C]."""

    plan: AttentionPlan
    norm: NormPlan
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    gate: Tensor | None
    o: Tensor
    o_bias: Tensor | None


@dataclass(frozen=True)
class O1Attention:
    """The O(1) kernel for teacher-forced windows sealed after `seal` tokens; m, w, sink as in a conversion.

    `landmark_count` 0: without a far field, which is measured and never served. `gain_limit`: see the kernel.
    """

    seal: int
    landmark_count: int
    window: int
    sink: int
    gain_limit: float = math.inf


@dataclass(frozen=True)
class Heads:
    """q [B, G, R, T, D], k, v [B, G, T, D], after norm and rotation; gate [B, G, R, T, D or 1] before its sigmoid."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    q_norm: rmsnorm.Saved | None
    k_norm: rmsnorm.Saved | None


class _QkvGrads(Protocol):
    @property
    def dq(self) -> Tensor: ...
    @property
    def dk(self) -> Tensor: ...
    @property
    def dv(self) -> Tensor: ...


@dataclass(frozen=True)
class Saved:
    """What the backward needs."""

    q_norm: rmsnorm.Saved | None
    k_norm: rmsnorm.Saved | None
    attention: causal_attention.Saved | o1_attention.Saved
    gate: sigmoid_gate.Saved | None


def attention_fwd(
    n: Tensor, weights: AttentionWeights, angles: Angles, batch: int, o1: O1Attention | None
) -> tuple[Tensor, Saved]:
    """y [N, C]. `o1` null: exact."""
    heads = project(n, weights, angles, batch)
    out: Tensor
    saved: causal_attention.Saved | o1_attention.Saved
    if o1 is None:
        out, saved = exact(heads, weights.plan)
    else:
        M = _inverse(heads, o1, weights.plan.scale)
        geometry = o1_attention.Geometry(o1.seal, o1.window, o1.sink, weights.plan.scale, o1.gain_limit)
        out, saved = o1_attention.o1_attention_fwd(heads.q, heads.k, heads.v, M, geometry)
    y, gate = project_out(out, heads.gate, weights)
    return y, Saved(heads.q_norm, heads.k_norm, saved, gate)


def _inverse(heads: Heads, o1: O1Attention, scale: float) -> Tensor:
    """M [B, G, R, m, m] in f64."""
    if o1.landmark_count == 0:
        return heads.q.new_zeros(*heads.q.shape[:3], 1, 1, dtype=torch.float64)
    Qt, Kt = o1_attention.landmarks(heads.q, heads.k, o1.seal, o1.landmark_count)
    return landmark_inverse(Qt, Kt.unsqueeze(2), scale)


def attention_bwd(dy: Tensor, saved: Saved, weights: AttentionWeights, angles: Angles) -> Tensor:
    """dn [N, C] for dy [N, C]."""
    plan = weights.plan
    H, G, D = plan.heads, plan.kv_heads, plan.head_dim
    B = saved.attention.k.shape[0]
    dout = linear_bwd_input(dy, weights.o).view(B, -1, G, H // G, D).permute(0, 2, 3, 1, 4)
    dgate = None
    if saved.gate is not None:
        gated = sigmoid_gate.sigmoid_gate_bwd(dout, saved.gate)
        dout, dgate = gated.dx, gated.dg
    grads: _QkvGrads
    if isinstance(saved.attention, o1_attention.Saved):
        grads = o1_attention.o1_attention_bwd(dout, saved.attention)
    else:
        grads = causal_attention.causal_attention_bwd(dout, saved.attention)
    return _project_bwd(grads, dgate, saved, weights, angles)


def wild_rows(saved: Saved) -> Tensor:
    """See `layer.wild_rows`."""
    assert isinstance(saved.attention, o1_attention.Saved)
    return (saved.attention.gain > 1).sum()


def project(n: Tensor, weights: AttentionWeights, angles: Angles, batch: int) -> Heads:
    """Queries, keys, values and output gate of rows n [B * T, C]."""
    plan = weights.plan
    H, G, D = plan.heads, plan.kv_heads, plan.head_dim
    q_width = H * D * (2 if plan.gate == "interleaved" else 1)
    q, k, v = torch.split(linear_fwd(n, weights.qkv, weights.qkv_bias), [q_width, G * D, G * D], dim=1)
    gate = None
    if plan.gate == "interleaved":
        q, gate = torch.split(q.view(-1, H, 2 * D), D, dim=2)
    elif weights.gate is not None:
        gate = linear_fwd(n, weights.gate).view(n.shape[0], H, -1)
    q, q_norm = _head_norm(q, weights.q_norm, weights)
    k, k_norm = _head_norm(k, weights.k_norm, weights)
    rotation = angles[plan.rotary]
    return Heads(
        q=rope_fwd(q.reshape(batch, -1, G, H // G, D).permute(0, 2, 3, 1, 4), rotation),
        k=rope_fwd(k.reshape(batch, -1, G, D).transpose(1, 2), rotation),
        v=v.reshape(batch, -1, G, D).transpose(1, 2).contiguous(),
        gate=None if gate is None else gate.reshape(batch, -1, G, H // G, gate.shape[-1]).permute(0, 2, 3, 1, 4),
        q_norm=q_norm,
        k_norm=k_norm,
    )


def exact(heads: Heads, plan: AttentionPlan) -> tuple[Tensor, causal_attention.Saved]:
    """Exact attention over the whole window, [B, G, R, T, D]."""
    return causal_attention.causal_attention_fwd(
        heads.q, heads.k, heads.v, plan.scale, window=plan.window, softcap=plan.softcap
    )


def project_out(
    out: Tensor, gate: Tensor | None, weights: AttentionWeights
) -> tuple[Tensor, sigmoid_gate.Saved | None]:
    """y [B * T, C] of head outputs [B, G, R, T, D]."""
    gate_saved = None
    if gate is not None:
        out, gate_saved = sigmoid_gate.sigmoid_gate_fwd(out, gate)
    rows = out.permute(0, 3, 1, 2, 4).reshape(out.shape[0] * out.shape[3], -1)
    return linear_fwd(rows, weights.o, weights.o_bias), gate_saved


def _head_norm(rows: Tensor, weight: Tensor | None, weights: AttentionWeights) -> tuple[Tensor, rmsnorm.Saved | None]:
    """RMSNorm of every head of rows [N, heads * D] (or [N, heads, D]), where the model has one."""
    if weight is None:
        return rows, None
    norm = weights.norm
    return rmsnorm.rmsnorm_fwd(rows.reshape(-1, weights.plan.head_dim), weight, norm.eps, plus_one=norm.plus_one)


def _project_bwd(
    grads: _QkvGrads, dgate: Tensor | None, saved: Saved, weights: AttentionWeights, angles: Angles
) -> Tensor:
    """Backward of `project`: each head gradient goes straight to its place in one [B, T, .] buffer."""
    plan, rotation = weights.plan, angles[weights.plan.rotary]
    B, G, R, T, D = grads.dq.shape
    dqkv = grads.dq.new_empty(B, T, weights.qkv.shape[0])
    dq_rows, dk_rows, dv_rows = torch.split(dqkv, [weights.qkv.shape[0] - 2 * G * D, G * D, G * D], dim=2)
    dq_heads = dq_rows.view(B, T, G, R, -1)
    if plan.gate == "interleaved" and dgate is not None:
        dq_heads[..., D:] = dgate.permute(0, 3, 1, 2, 4)
    dq_heads = dq_heads[..., :D]
    dk_heads = dk_rows.view(B, T, G, D)
    rope_bwd(grads.dq, rotation, out=dq_heads.permute(0, 2, 3, 1, 4))
    rope_bwd(grads.dk, rotation, out=dk_heads.transpose(1, 2))
    dv_rows.view(B, T, G, D).copy_(grads.dv.transpose(1, 2))
    for heads, norm in ((dq_heads, saved.q_norm), (dk_heads, saved.k_norm)):
        if norm is not None:
            heads.copy_(rmsnorm.rmsnorm_bwd(heads.reshape(-1, D), norm).dx.view(heads.shape))
    dn = linear_bwd_input(dqkv.view(B * T, -1), weights.qkv)
    if weights.gate is not None and dgate is not None:
        dn.addmm_(dgate.permute(0, 3, 1, 2, 4).reshape(B * T, -1), weights.gate)
    return dn
