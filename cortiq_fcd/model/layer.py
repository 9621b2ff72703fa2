"""One transformer layer, forward and backward.

    n1 = rmsnorm(x);  h1 = x + mixer(n1);  n2 = rmsnorm(h1);  y = h1 + down(silu(gate n2) * up n2)

x, y [N, C] with N = B * T rows, b-major. The mixer (attention or GatedDeltaNet) is frozen, so only its input gets a
gradient. Gate and up are one stacked product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.kernels import rmsnorm, swiglu
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from cortiq_fcd.model import attention, delta_net
from cortiq_fcd.model.attention import Angles, AttentionWeights, O1Attention
from cortiq_fcd.model.delta_net import DeltaNetWeights
from cortiq_fcd.model.plan import NormPlan

MixerWeights: TypeAlias = AttentionWeights | DeltaNetWeights


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights as the products want them: gate_up [2F, C], down [C, F]."""

    norm: NormPlan
    input_norm: Tensor
    mixer: MixerWeights
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
class FfnSaved:
    """What the backward of `feed_forward` needs. n2 [N, C] and act [N, F] are inputs of trained products."""

    norm: rmsnorm.Saved
    n2: Tensor
    swiglu: swiglu.Saved
    act: Tensor


@dataclass(frozen=True)
class LayerSaved:
    """What `layer_bwd` needs."""

    norm: rmsnorm.Saved
    mixer: attention.Saved | delta_net.Saved
    ffn: FfnSaved


def layer_fwd(
    x: Tensor, weights: LayerWeights, angles: Angles, batch: int, o1: O1Attention | None
) -> tuple[Tensor, LayerSaved]:
    """y [N, C]. `o1` null: exact attention."""
    h1, norm, mixer = _mixed(x, weights, angles, batch, o1)
    y, ffn = feed_forward(h1, weights)
    return y, LayerSaved(norm, mixer, ffn)


def layer_saved(x: Tensor, weights: LayerWeights, angles: Angles, batch: int, o1: O1Attention | None) -> LayerSaved:
    """What `layer_fwd` saves, without y."""
    h1, norm, mixer = _mixed(x, weights, angles, batch, o1)
    return LayerSaved(norm, mixer, _activation(h1, weights))


def wild_rows(saved: LayerSaved) -> Tensor:
    """How many rows of an O(1) kernel, heads counted one by one, are longer than every value they sum: [] int64."""
    assert isinstance(saved.mixer, attention.Saved)
    return attention.wild_rows(saved.mixer)


def _mixed(
    x: Tensor, weights: LayerWeights, angles: Angles, batch: int, o1: O1Attention | None
) -> tuple[Tensor, rmsnorm.Saved, attention.Saved | delta_net.Saved]:
    """h1 [N, C]."""
    n1, norm = input_norm(x, weights)
    mixer: attention.Saved | delta_net.Saved
    if isinstance(weights.mixer, DeltaNetWeights):
        mixed, _, mixer = delta_net.delta_net_fwd(n1, weights.mixer, batch)
    else:
        mixed, mixer = attention.attention_fwd(n1, weights.mixer, angles, batch, o1)
    return mixed.add_(x), norm, mixer


def layer_bwd(dy: Tensor, saved: LayerSaved, weights: LayerWeights, angles: Angles, grads: Trainable | None) -> Tensor:
    """dx [N, C] for dy [N, C]. The gradients of trained tensors are written into `grads`, where given."""
    dh1 = _feed_forward_bwd(dy, saved.ffn, weights, grads)
    if isinstance(weights.mixer, DeltaNetWeights):
        assert isinstance(saved.mixer, delta_net.Saved)
        dn1 = delta_net.delta_net_bwd(dh1, saved.mixer, weights.mixer)
    else:
        assert isinstance(saved.mixer, attention.Saved)
        dn1 = attention.attention_bwd(dh1, saved.mixer, weights.mixer, angles)
    norm = rmsnorm.rmsnorm_bwd(dn1, saved.norm)
    if grads is not None:
        grads.input_norm.copy_(norm.dw)
    return norm.dx.add_(dh1)


def input_norm(x: Tensor, weights: LayerWeights) -> tuple[Tensor, rmsnorm.Saved]:
    """n1, what the mixer reads."""
    return rmsnorm.rmsnorm_fwd(x, weights.input_norm, weights.norm.eps, plus_one=weights.norm.plus_one)


def feed_forward(h1: Tensor, weights: LayerWeights) -> tuple[Tensor, FfnSaved]:
    """y = h1 + down(silu(gate n2) * up n2), n2 = rmsnorm(h1)."""
    saved = _activation(h1, weights)
    return linear_fwd(saved.act, weights.down).add_(h1), saved


def _activation(h1: Tensor, weights: LayerWeights) -> FfnSaved:
    """All of the feed-forward block but its last product."""
    n2, norm = rmsnorm.rmsnorm_fwd(h1, weights.post_norm, weights.norm.eps, plus_one=weights.norm.plus_one)
    gate, up = linear_fwd(n2, weights.gate_up).chunk(2, dim=1)
    act, act_saved = swiglu.swiglu_fwd(gate, up)
    return FfnSaved(norm, n2, act_saved, act)


def _feed_forward_bwd(dy: Tensor, saved: FfnSaved, weights: LayerWeights, grads: Trainable | None) -> Tensor:
    """dh1 [N, C]."""
    dact = linear_bwd_input(dy, weights.down)
    dgate_up = swiglu.swiglu_bwd(dact, saved.swiglu).dgate_up
    norm = rmsnorm.rmsnorm_bwd(linear_bwd_input(dgate_up, weights.gate_up), saved.norm)
    if grads is not None:  # only now: gradients may be written over the weights
        linear_bwd_weight(dy, saved.act, out=grads.down)
        linear_bwd_weight(dgate_up, saved.n2, out=grads.gate_up)
        grads.post_norm.copy_(norm.dw)
    return norm.dx.add_(dy)


def embed(ids: Tensor, table: Tensor, multiplier: float) -> Tensor:
    """Rows [B * T, C] of the embedding table for ids [B, T], times the model's constant."""
    rows = torch.index_select(table, 0, ids.reshape(-1))
    return rows if multiplier == 1 else rows.mul_(multiplier)
