"""Depthwise causal convolution over time, then SiLU.

    c[t] = sum_tau w[:, tau] x[t - K + 1 + tau]  (x before position 0 is 0);   y = silu(c)
    dc = dy * s (1 + c (1 - s)), s = sigmoid(c);   dx[t] = sum_tau w[:, tau] dc[t + K - 1 - tau]

x, y [B, T, C]; weight [C, K], taps oldest to newest. The taps are frozen: no gradient for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.widen import widened


@dataclass(frozen=True)
class Saved:
    """The convolution's output before the activation [B, T, C], and the taps."""

    pre: Tensor
    weight: Tensor
    dtype: torch.dtype  # of the input


def causal_conv_fwd(x: Tensor, weight: Tensor) -> tuple[Tensor, Saved]:
    """silu(conv(x)). Raises ValueError when the channels differ."""
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"causal_conv: x {tuple(x.shape)} and weight {tuple(weight.shape)} don't meet")
    dtype, x, weight = x.dtype, widened(x), widened(weight)
    taps, T = weight.shape[1], x.shape[1]
    pre = x * weight[:, -1]
    for back in range(1, min(taps, T)):
        pre[:, back:].addcmul_(x[:, : T - back], weight[:, taps - 1 - back])
    return torch.sigmoid(pre).mul_(pre).to(dtype), Saved(pre, weight, dtype)


def causal_conv_bwd(dy: Tensor, saved: Saved) -> Tensor:
    """dx [B, T, C] for dy [B, T, C]. Raises ValueError when dy has another shape."""
    pre, weight = saved.pre, saved.weight
    if dy.shape != pre.shape:
        raise ValueError(f"causal_conv: dy {tuple(dy.shape)} and x {tuple(pre.shape)} don't meet")
    taps, T = weight.shape[1], pre.shape[1]
    sigmoid = torch.sigmoid(pre)
    silu = sigmoid * pre
    # s (1 + c (1 - s)) = s + silu - s silu
    dpre = silu.addcmul(sigmoid, silu, value=-1).add_(sigmoid).mul_(dy)
    dx = dpre * weight[:, -1]
    for back in range(1, min(taps, T)):
        dx[:, : T - back].addcmul_(dpre[:, back:], weight[:, taps - 1 - back])
    return dx.to(saved.dtype)


def causal_conv_step(x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One position x [B, C] after the last K - 1 inputs tail [B, K - 1, C]: the output [B, C] and the next tail.

    Raises ValueError when the shapes don't meet.
    """
    if x.dim() != 2 or weight.dim() != 2 or tail.shape != (x.shape[0], weight.shape[1] - 1, weight.shape[0]):
        raise ValueError(
            f"causal_conv: x {tuple(x.shape)}, tail {tuple(tail.shape)}, weight {tuple(weight.shape)} don't meet"
        )
    if x.shape[1] != weight.shape[0]:
        raise ValueError(f"causal_conv: x {tuple(x.shape)} and weight {tuple(weight.shape)} don't meet")
    inputs = torch.cat((tail, x.unsqueeze(1)), 1)
    pre = (widened(inputs) * widened(weight).T).sum(1)
    return torch.sigmoid(pre).mul_(pre).to(x.dtype), inputs[:, 1:]
