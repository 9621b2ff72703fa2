"""Attention as T x T matrices, in the dtype of the inputs (the tests use f64).

q [B, G, R, T, D]; k, v [B, G, T, .]; R query heads share a kv head. `dense_*` are autograd-able.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    T = q.shape[-2]
    t, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= t) & (t - j < (window or T))
    logits = q @ k[:, :, None].mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ v[:, :, None]


def segment_means(x: Tensor, prefix: int, segments: int) -> Tensor:
    means = [x[..., i * prefix // segments : (i + 1) * prefix // segments, :].mean(-2) for i in range(segments)]
    return torch.stack(means, -2)


def landmark_inverse(landmark_q: Tensor, landmark_k: Tensor, scale: float) -> Tensor:
    """The ridge inverse through an explicit inverse and without shifts: moderate logits only."""
    kernel = (landmark_q.double() @ landmark_k.double().mT * scale).exp()
    gram = kernel.mT @ kernel
    ridge = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.linalg.inv(gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype)) @ kernel.mT


@dataclass
class Joint:
    """out [B, G, R, T, Dv]; per row [B, G, R, T]: sum of far weights, sum of their absolute terms, whether the guard
    kept them, and the noise amplification kappa (polish.md section 3). Rows before the seal: 0, 0, true, 1."""

    out: Tensor
    far_sum: Tensor
    far_abs: Tensor
    kept: Tensor
    kappa: Tensor
    weights: Tensor  # far weights before the guard, [B, G, R, T, T]


def o1_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    M: Tensor,
    *,
    seal: int,
    window: int,
    sink: int,
    scale: float,
    clamp_each_key: bool = False,
    stop_landmarks: bool = False,
) -> Joint:
    """The joint kernel from its definition. `clamp_each_key` is the wrong guard, to show that a test would see it.

    Weights are shifted by each row's near maximum; nothing else is done about range. exp(q Kt) M exp(Qt k) shift has
    exponents of up to |logit| each, so f64 holds for logits up to about +-170, and +-200 unless all four add up.
    """
    T, m = q.shape[-2], M.shape[-1]
    t, j = torch.arange(T)[:, None], torch.arange(T)
    causal = j <= t
    near = causal & ((t - j < window) | (j < sink) | (t < seal))
    far = causal & ~near
    Qt, Kt = segment_means(q, seal, m), segment_means(k, seal, m)
    logits = q @ k[:, :, None].mT * scale
    top = logits.masked_fill(~near, -torch.inf).amax(-1, keepdim=True).detach()
    near_weights = (logits - top).masked_fill(~near, -torch.inf).exp()
    F = (q @ Kt[:, :, None].mT * scale).exp()
    E = (Qt @ k[:, :, None].mT * scale).exp()
    far_weights = ((F @ M) @ E).masked_fill(~far, 0)
    if clamp_each_key:
        far_weights = far_weights.clamp_min(0)
    far_abs = ((F @ M.abs()) @ E).masked_fill(~far, 0).sum(-1)
    far_sum = far_weights.sum(-1)
    kept = far_sum >= 0
    shifted = torch.where(kept[..., None], far_weights * (-top).exp(), 0.0)
    weights = near_weights + shifted
    den = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    out = weights @ v[:, :, None] / den
    absolute = near_weights.sum(-1) + torch.where(kept, far_abs * (-top[..., 0]).exp(), 0.0)
    return Joint(out, far_sum, far_abs, kept, absolute / den[..., 0], far_weights)


def default_scale(D: int) -> float:
    return 1 / math.sqrt(D)
