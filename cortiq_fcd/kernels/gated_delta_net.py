"""The GatedDeltaNet mixer over a sequence: convolution, gates, delta rule, gated norm. All its weights are frozen.

    [q, k, v] = silu(causal_conv(qkv));   q_hat = q / |q| / sqrt(Dk),  k_hat = k / |k|   (|x| = sqrt(sum x^2 + 1e-6))
    log g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b);   o = delta_rule(q_hat, k_hat, v, log g, beta)
    y = rmsnorm(o) * silu(z), the norm per head with gain w

The backward is the chain of the parts' backwards, with da = -dlog_g exp(A_log) sigmoid(a + dt_bias) and
db = dbeta beta (1 - beta). Softplus is the identity above 20.

Streams [B, T, .]: qkv 2 G Dk + G R Dv channels in the order q, k, v; z G R Dv; a, b G R: R value heads share a key
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_conv, delta_rule, l2norm, rmsnorm, swiglu
from cortiq_fcd.kernels.widen import widened

L2_EPS = 1e-6
SOFTPLUS_LINEAR_FROM = 20.0


@dataclass(frozen=True)
class Parameters:
    """Frozen weights: conv [channels, K], A_log and dt_bias [G R], norm [Dv]; and the head sizes."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    norm_eps: float
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def shared(self) -> int:
        """R, value heads a key head."""
        return self.A_log.shape[0] // self.key_heads

    @property
    def splits(self) -> list[int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return [keys, keys, self.A_log.shape[0] * self.value_dim]

    def widened(self) -> Parameters:
        """The weights in f32 at least."""
        conv, A_log, dt_bias, norm = (widened(w) for w in (self.conv, self.A_log, self.dt_bias, self.norm))
        return replace(self, conv=conv, A_log=A_log, dt_bias=dt_bias, norm=norm)


@dataclass(frozen=True)
class Streams:
    """The four projections of the layer's input, [B, T, .] each, or their gradients."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor

    def widened(self) -> Streams:
        """The streams in f32 at least."""
        return Streams(*(widened(x) for x in (self.qkv, self.z, self.a, self.b)))


@dataclass
class State:
    """What decoding carries on, in f32 at least.

    The convolution's last K - 1 inputs [B, K - 1, channels] and S [B, G, R, Dk, Dv].
    """

    tail: Tensor
    S: Tensor


@dataclass(frozen=True)
class Saved:
    """What the backward needs."""

    parameters: Parameters
    conv: causal_conv.Saved
    q: l2norm.Saved
    k: l2norm.Saved
    gate_in: Tensor  # a + dt_bias [B, T, G R]
    beta: Tensor  # [B, T, G R]
    delta: delta_rule.Saved
    norm: rmsnorm.Saved
    gated: swiglu.Saved
    dtype: torch.dtype  # of the streams; what is kept is at least f32


def gated_delta_net_fwd(x: Streams, p: Parameters) -> tuple[Tensor, State, Saved]:
    """y [B, T, G R Dv], the state after the last position, and what the backward needs. bf16 is computed in f32.

    Raises ValueError when the shapes don't meet.
    """
    B, T = x.z.shape[:2]
    G, R, Dk, Dv = p.key_heads, p.shared, p.key_dim, p.value_dim
    _check_streams(x, p)
    dtype = x.qkv.dtype
    x, p = x.widened(), p.widened()
    mixed, conv = causal_conv.causal_conv_fwd(x.qkv, p.conv)
    q, k, v = torch.split(mixed, p.splits, 2)
    q, q_saved = l2norm.l2norm_fwd(q.reshape(B, T, G, Dk).transpose(1, 2), L2_EPS, Dk**-0.5)
    k, k_saved = l2norm.l2norm_fwd(k.reshape(B, T, G, Dk).transpose(1, 2), L2_EPS)
    gate_in = x.a + p.dt_bias
    beta = torch.sigmoid(x.b)
    o, S, delta = delta_rule.delta_rule_fwd(
        q,
        k,
        v.reshape(B, T, G, R, Dv).permute(0, 2, 3, 1, 4),
        _by_head(_log_decay(gate_in, p), G, R),
        _by_head(beta, G, R),
    )
    rows = o.permute(0, 3, 1, 2, 4).reshape(-1, Dv)
    normed, norm = rmsnorm.rmsnorm_fwd(rows, p.norm, p.norm_eps, plus_one=False)
    y, gated = swiglu.swiglu_fwd(x.z.reshape(-1, Dv), normed)
    tail = _tail(x.qkv, p.conv.shape[1] - 1)
    saved = Saved(p, conv, q_saved, k_saved, gate_in, beta, delta, norm, gated, dtype)
    return y.view(B, T, -1).to(dtype), State(tail, S), saved


def gated_delta_net_bwd(dy: Tensor, saved: Saved) -> Streams:
    """Gradients of the four streams for dy [B, T, G R Dv]. Raises ValueError when dy has another shape."""
    p = saved.parameters
    if dy.shape != (*saved.gate_in.shape[:2], p.splits[2]):
        raise ValueError(f"gated_delta_net: dy {tuple(dy.shape)} does not fit {p.splits[2]} channels")
    dy = widened(dy)
    B, T = dy.shape[:2]
    G, R, Dk, Dv = p.key_heads, p.shared, p.key_dim, p.value_dim
    gated = swiglu.swiglu_bwd(dy.reshape(-1, Dv), saved.gated)
    do = rmsnorm.rmsnorm_bwd(gated.dup, saved.norm).dx.view(B, T, G, R, Dv).permute(0, 2, 3, 1, 4)
    delta = delta_rule.delta_rule_bwd(do, saved.delta)
    dmixed = torch.cat(
        (
            l2norm.l2norm_bwd(delta.dq, saved.q).transpose(1, 2).reshape(B, T, G * Dk),
            l2norm.l2norm_bwd(delta.dk, saved.k).transpose(1, 2).reshape(B, T, G * Dk),
            delta.dv.permute(0, 3, 1, 2, 4).reshape(B, T, G * R * Dv),
        ),
        2,
    )
    dlog_g, dbeta = (t.permute(0, 3, 1, 2).reshape(B, T, G * R) for t in (delta.dlog_g, delta.dbeta))
    slope = torch.where(saved.gate_in > SOFTPLUS_LINEAR_FROM, 1.0, torch.sigmoid(saved.gate_in))
    return Streams(
        qkv=causal_conv.causal_conv_bwd(dmixed, saved.conv).to(saved.dtype),
        z=gated.dgate.reshape(B, T, -1).to(saved.dtype),
        a=(-dlog_g * p.A_log.exp() * slope).to(saved.dtype),
        b=(dbeta * saved.beta * (1 - saved.beta)).to(saved.dtype),
    )


def gated_delta_net_step(x: Streams, state: State, p: Parameters) -> Tensor:
    """y [B, G R Dv] of one more position, streams [B, .]; the state moves on. Raises ValueError on shapes."""
    _check_streams(x, p)
    dtype, x, p = x.qkv.dtype, x.widened(), p.widened()
    G, R, Dk, Dv = p.key_heads, p.shared, p.key_dim, p.value_dim
    mixed, state.tail = causal_conv.causal_conv_step(x.qkv, state.tail, p.conv)
    q, k, v = torch.split(mixed, p.splits, 1)
    q, _ = l2norm.l2norm_fwd(q.reshape(-1, G, Dk), L2_EPS, Dk**-0.5)
    k, _ = l2norm.l2norm_fwd(k.reshape(-1, G, Dk), L2_EPS)
    log_g = _log_decay(x.a + p.dt_bias, p).view(-1, G, R)
    o, state.S = delta_rule.delta_rule_step(
        state.S, q, k, v.reshape(-1, G, R, Dv), log_g, torch.sigmoid(x.b).view(-1, G, R)
    )
    normed, _ = rmsnorm.rmsnorm_fwd(o.reshape(-1, Dv), p.norm, p.norm_eps, plus_one=False)
    return swiglu.swiglu_fwd(x.z.reshape(-1, Dv), normed)[0].view(x.z.shape).to(dtype)


def _check_streams(x: Streams, p: Parameters) -> None:
    widths = (x.qkv.shape[-1], x.z.shape[-1], x.a.shape[-1], x.b.shape[-1])
    heads = p.A_log.shape[0]
    if widths != (sum(p.splits), p.splits[2], heads, heads):
        raise ValueError(f"gated_delta_net: streams of {widths} channels don't fit {heads} value heads")


def _log_decay(gate_in: Tensor, p: Parameters) -> Tensor:
    softplus = torch.where(gate_in > SOFTPLUS_LINEAR_FROM, gate_in, torch.log1p(gate_in.clamp(max=80).exp()))
    return -p.A_log.exp() * softplus


def _by_head(x: Tensor, G: int, R: int) -> Tensor:
    """[B, T, G R] -> [B, G, R, T]."""
    return x.view(*x.shape[:2], G, R).permute(0, 2, 3, 1)


def _tail(x: Tensor, count: int) -> Tensor:
    """The last `count` rows of x [B, T, C], zeros before the first."""
    missing = max(0, count - x.shape[1])
    return torch.cat((x.new_zeros(x.shape[0], missing, x.shape[2]), x[:, x.shape[1] - (count - missing) :]), 1)
