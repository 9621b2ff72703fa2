"""One transformer layer, forward and backward, made of kernels.

    n1 = rmsnorm(x);  h1 = x + attention(n1) Wo^T;  n2 = rmsnorm(h1);  y = h1 + down(silu(gate n2) * up n2)

x, y [N, C] with N = B * T rows, b-major. Projections that read the same rows are one product: q, k, v stacked in `qkv`,
gate and up in `gate_up`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_attention, o1_attention, rmsnorm, swiglu
from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from cortiq_fcd.kernels.rope import Rotation, rope_bwd, rope_fwd


@dataclass(frozen=True)
class LayerShape:
    """Sizes and constants of a layer: query heads H, kv heads G, head dim D, and the norm's form."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    norm_plus_one: bool

    @property
    def scale(self) -> float:
        """What multiplies q k^T."""
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class LayerWeights:
    """Weights as the products want them. qkv [(H + 2G) D, C]; o [C, H D]; gate_up [2F, C]; down [C, F]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Trainable:
    """The tensors of a layer that a polish trains, or their gradients, in the recipe's order."""

    input_norm: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class O1Attention:
    """The O(1) kernel for teacher-forced windows: landmark count and geometry."""

    landmark_count: int
    geometry: o1_attention.Geometry


_AttentionSaved: TypeAlias = causal_attention.Saved | o1_attention.Saved


class _AttentionGrads(Protocol):
    @property
    def dq(self) -> Tensor: ...
    @property
    def dk(self) -> Tensor: ...
    @property
    def dv(self) -> Tensor: ...


@dataclass(frozen=True)
class QkvSaved:
    """What the backward of `project_qkv` needs."""

    norm: rmsnorm.Saved
    q_norm: rmsnorm.Saved | None
    k_norm: rmsnorm.Saved | None


@dataclass(frozen=True)
class FfnSaved:
    """What the backward of `feed_forward` needs. n2 [N, C] and act [N, F] are inputs of trained products."""

    norm: rmsnorm.Saved
    n2: Tensor
    swiglu: swiglu.Saved
    act: Tensor


@dataclass(frozen=True)
class LayerSaved:
    """What `layer_bwd` needs."""

    qkv: QkvSaved
    attention: _AttentionSaved
    ffn: FfnSaved


def layer_fwd(
    x: Tensor, weights: LayerWeights, shape: LayerShape, rotation: Rotation, batch: int, attention: O1Attention | None
) -> tuple[Tensor, LayerSaved]:
    """y [N, C]. `attention` null: exact."""
    q, k, v, qkv_saved = project_qkv(x, weights, shape, rotation, batch)
    out: Tensor
    attention_saved: _AttentionSaved
    if attention is None:
        out, attention_saved = causal_attention.causal_attention_fwd(q, k, v, shape.scale)
    else:
        Qt, Kt = o1_attention.landmarks(q, k, attention.geometry.seal, attention.landmark_count)
        M = landmark_inverse(Qt, Kt.unsqueeze(2), shape.scale)
        out, attention_saved = o1_attention.o1_attention_fwd(q, k, v, M, attention.geometry)
    h1 = attention_output(out, x, weights)
    y, ffn_saved = feed_forward(h1, weights, shape)
    return y, LayerSaved(qkv_saved, attention_saved, ffn_saved)


def layer_bwd(
    dy: Tensor, saved: LayerSaved, weights: LayerWeights, rotation: Rotation, grads: Trainable | None
) -> Tensor:
    """dx [N, C] for dy [N, C]. The gradients of trained tensors are written into `grads`, where given."""
    ffn = saved.ffn
    dact = linear_bwd_input(dy, weights.down)
    dgate_up = swiglu.swiglu_bwd(dact, ffn.swiglu).dgate_up
    norm2 = rmsnorm.rmsnorm_bwd(linear_bwd_input(dgate_up, weights.gate_up), ffn.norm)
    if grads is not None:
        linear_bwd_weight(dy, ffn.act, out=grads.down)
        linear_bwd_weight(dgate_up, ffn.n2, out=grads.gate_up)
        grads.post_norm.copy_(norm2.dw)
    dh1 = norm2.dx.add_(dy)
    dout = _split_heads(linear_bwd_input(dh1, weights.o), saved.attention)
    attention_grads: _AttentionGrads
    if isinstance(saved.attention, o1_attention.Saved):
        attention_grads = o1_attention.o1_attention_bwd(dout, saved.attention)
    else:
        attention_grads = causal_attention.causal_attention_bwd(dout, saved.attention)
    norm1 = _project_qkv_bwd(attention_grads, saved.qkv, weights, rotation)
    if grads is not None:
        grads.input_norm.copy_(norm1.dw)
    return norm1.dx.add_(dh1)


def project_qkv(
    x: Tensor, weights: LayerWeights, shape: LayerShape, rotation: Rotation, batch: int
) -> tuple[Tensor, Tensor, Tensor, QkvSaved]:
    """q [B, G, R, T, D], k [B, G, T, D] (normalised, rotated) and v [B, G, T, D] of x [B * T, C]."""
    H, G, D = shape.heads, shape.kv_heads, shape.head_dim
    n1, norm = rmsnorm.rmsnorm_fwd(x, weights.input_norm, shape.norm_eps, plus_one=shape.norm_plus_one)
    q, k, v = torch.split(linear_fwd(n1, weights.qkv, weights.qkv_bias), [H * D, G * D, G * D], dim=1)
    q_norm = k_norm = None
    if weights.q_norm is not None:
        q, q_norm = _head_norm(q, weights.q_norm, shape)
    if weights.k_norm is not None:
        k, k_norm = _head_norm(k, weights.k_norm, shape)
    q = q.reshape(batch, -1, G, H // G, D).permute(0, 2, 3, 1, 4)
    k, v = (rows.reshape(batch, -1, G, D).transpose(1, 2) for rows in (k, v))
    return rope_fwd(q, rotation), rope_fwd(k, rotation), v.contiguous(), QkvSaved(norm, q_norm, k_norm)


def attention_output(out: Tensor, x: Tensor, weights: LayerWeights) -> Tensor:
    """h1 = x + heads Wo^T for out [B, G, R, T, D]."""
    heads = out.permute(0, 3, 1, 2, 4).reshape(x.shape[0], -1)
    return linear_fwd(heads, weights.o, weights.o_bias).add_(x)


def feed_forward(h1: Tensor, weights: LayerWeights, shape: LayerShape) -> tuple[Tensor, FfnSaved]:
    """y = h1 + down(silu(gate n2) * up n2), n2 = rmsnorm(h1)."""
    n2, norm = rmsnorm.rmsnorm_fwd(h1, weights.post_norm, shape.norm_eps, plus_one=shape.norm_plus_one)
    gate, up = linear_fwd(n2, weights.gate_up).chunk(2, dim=1)
    act, act_saved = swiglu.swiglu_fwd(gate, up)
    return linear_fwd(act, weights.down).add_(h1), FfnSaved(norm, n2, act_saved, act)


def _head_norm(rows: Tensor, weight: Tensor, shape: LayerShape) -> tuple[Tensor, rmsnorm.Saved]:
    """RMSNorm of every head of rows [N, heads * D]."""
    y, saved = rmsnorm.rmsnorm_fwd(
        rows.reshape(-1, shape.head_dim), weight, shape.norm_eps, plus_one=shape.norm_plus_one
    )
    return y.view(rows.shape), saved


def _split_heads(rows: Tensor, saved: _AttentionSaved) -> Tensor:
    """[N, H D] -> [B, G, R, T, D], a view."""
    B, G = saved.k.shape[:2]
    return rows.view(B, -1, G, rows.shape[1] // (G * saved.v.shape[-1]), saved.v.shape[-1]).permute(0, 2, 3, 1, 4)


def _project_qkv_bwd(
    grads: _AttentionGrads, saved: QkvSaved, weights: LayerWeights, rotation: Rotation
) -> rmsnorm.Grads:
    """Backward of `project_qkv`: each head gradient goes straight to its place in one [N, .] buffer."""
    B, G, R, T, D = grads.dq.shape
    dqkv = grads.dq.new_empty(B, T, G * (R + 2) * D)
    dq, dk, dv = torch.split(dqkv, [G * R * D, G * D, G * D], dim=2)
    rope_bwd(grads.dq, rotation, out=dq.view(B, T, G, R, D).permute(0, 2, 3, 1, 4))
    rope_bwd(grads.dk, rotation, out=dk.view(B, T, G, D).transpose(1, 2))
    dv.view(B, T, G, D).copy_(grads.dv.transpose(1, 2))
    for rows, norm in ((dq, saved.q_norm), (dk, saved.k_norm)):
        if norm is not None:
            rows.copy_(rmsnorm.rmsnorm_bwd(rows.reshape(-1, D), norm).dx.view(rows.shape))
    return rmsnorm.rmsnorm_bwd(linear_bwd_input(dqkv.view(B * T, -1), weights.qkv), saved.norm)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows [B * T, C] of the embedding table [V, C] for ids [B, T]."""
    return torch.index_select(table, 0, ids.reshape(-1))
