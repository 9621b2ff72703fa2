"""GatedDeltaNet position by position, autograd-able."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """silu of the depthwise convolution of x [B, T, C] with weight [C, K], taps oldest to newest."""
    T, K = x.shape[1], weight.shape[1]
    padded = torch.cat((torch.zeros_like(x[:, :1]).expand(-1, K - 1, -1), x), 1)
    c = torch.stack([(padded[:, t : t + K] * weight.T).sum(1) for t in range(T)], 1)
    return c / (1 + torch.exp(-c))


def l2norm(x: Tensor, eps: float, length: float = 1.0) -> Tensor:
    return length * x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, G, R, T, Dv] and the last state [B, G, R, Dk, Dv]; q, k [B, G, T, Dk], v [B, G, R, T, Dv]."""
    S = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    out = []
    for t in range(k.shape[2]):
        key, query = k[:, :, None, t, :, None], q[:, :, None, t, :, None]
        S = S * log_g[..., t, None, None].exp()
        u = beta[..., t, None] * (v[..., t, :] - (S * key).sum(-2))
        S = S + key * u[..., None, :]
        out.append((S * query).sum(-2))
    return torch.stack(out, 3), S


def gated_delta_net(
    qkv: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    G: int,
    R: int,
    Dk: int,
    Dv: int,
) -> Tensor:
    """y [B, T, G R Dv] from the four streams [B, T, .]."""
    B, T = qkv.shape[:2]
    mixed = causal_conv(qkv, conv)
    q, k, v = mixed.split([G * Dk, G * Dk, G * R * Dv], 2)
    q = l2norm(q.reshape(B, T, G, Dk), 1e-6, Dk**-0.5).transpose(1, 2)
    k = l2norm(k.reshape(B, T, G, Dk), 1e-6).transpose(1, 2)
    v = v.reshape(B, T, G, R, Dv).permute(0, 2, 3, 1, 4)
    log_g = -torch.exp(A_log) * torch.nn.functional.softplus(a + dt_bias, threshold=20)
    heads = [x.reshape(B, T, G, R).permute(0, 2, 3, 1) for x in (log_g, torch.sigmoid(b))]
    o, _ = delta_rule(q, k, v, *heads)
    o = o.permute(0, 3, 1, 2, 4)
    o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + eps) * norm
    gate = z.reshape(o.shape)
    return (o * gate / (1 + torch.exp(-gate))).reshape(B, T, -1)
