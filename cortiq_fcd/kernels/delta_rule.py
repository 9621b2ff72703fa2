"""The gated delta rule, chunk-parallel (WY form).

    S <- g_t S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T q_t

Within a chunk that begins with state S0, with G the running sum of log g and D[t, i] = exp(G_t - G_i):

    (I + L) U = beta V - beta e^G K S0,   L[t, i] = beta_t D[t, i] (k_t . k_i), i < t
    O = e^G Q S0 + P U,   P[t, i] = D[t, i] (q_t . k_i), i <= t
    S' = e^{G_end} S0 + (e^{G_end - G} K)^T U

so that, with (I + L)^-1 applied to beta V and beta e^G K for all chunks at once, only S goes from chunk to chunk. The
backward runs the state's gradient from the last chunk to the first in the same way; everything else is again one batch.
Only differences of log decays that are <= 0 are exponentiated, so no decay is too strong. What G itself is owed
collapses: from o and S' being linear in (S0, V) together,

    dG-sum from t to the chunk's end = sum_{s >= t} (dO_s . o_s - dv_s . v_s) + <S', dS'> = dlog_g_t

q, k [B, G, T, Dk] (normalised); v [B, G, R, T, Dv]: R value heads share a key head; log_g, beta [B, G, R, T]; n chunks
of c positions. Source: Yang et al. 2024 (Gated Delta Networks, arXiv 2412.06464); docs/maths.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.exponential import LOG2_E
from cortiq_fcd.kernels.unit_lower_inverse import unit_lower_inverse
from cortiq_fcd.kernels.widen import widened

# Positions a chunk: the c x c systems cost T c, the states T / c.
CHUNK = 64


@dataclass(frozen=True)
class _Chunks:
    """Inputs cut into chunks; all [n, B, G, R, c, .] but q and k (1 for R). A chunk is one piece of memory."""

    q: Tensor  # [n, B, G, 1, c, Dk]
    k: Tensor  # [n, B, G, 1, c, Dk]
    v: Tensor  # [.., c, Dv]
    beta: Tensor  # [.., c, 1]
    from_start: Tensor  # exp(G), [.., c, 1]
    to_end: Tensor  # exp(G_end - G), [.., c, 1]
    decay: Tensor  # exp(G_t - G_i) for i <= t, else 0, [.., c, c]

    @property
    def whole(self) -> Tensor:
        """exp(G_end), [.., 1, 1]."""
        return self.from_start[..., -1:, :]


def _chunks(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> _Chunks:
    # G reaches hundreds at strong decay, and its differences must keep their digits: f64 up to there. An exponent
    # x <= 0 may then be rounded, since |x| e^x never exceeds 1/e. G is in units of ln 2 for the sake of exp2 (see
    # `exponential`).
    G = _cut(log_g.double().unsqueeze(-1)).cumsum(-2).mul_(LOG2_E)
    difference = (G - G.mT).to(q.dtype)
    above = torch.ones(difference.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return _Chunks(
        q=_cut(q.unsqueeze(2)),
        k=_cut(k.unsqueeze(2)),
        v=_cut(v),
        beta=_cut(beta.unsqueeze(-1)),
        from_start=G.exp2().to(q.dtype),
        to_end=(G[..., -1:, :] - G).exp2_().to(q.dtype),
        decay=difference.masked_fill_(above, -torch.inf).exp2_(),
    )


@dataclass(frozen=True)
class Saved:
    """What the backward needs: chunked inputs, the inverse, the solved right sides, and the states."""

    chunks: _Chunks
    rows: int  # T
    dtype: torch.dtype  # of the inputs
    out: Tensor  # [.., c, Dv], not narrowed
    gram: Tensor  # k_t . k_i for i < t, else 0, [n, B, G, 1, c, c]
    P: Tensor  # [.., c, c], lower
    inverse: Tensor  # (I + L)^-1, [.., c, c]
    solved: Tensor  # (I + L)^-1 [beta V, beta e^G K], [.., c, Dv + Dk]
    end_key: Tensor  # e^{G_end - G} K, [.., c, Dk]
    U: Tensor  # [.., c, Dv]
    S: Tensor  # [n + 1, B, G, R, Dk, Dv]: before chunk i, and after the last


@dataclass(frozen=True)
class Grads:
    """Gradients with the shapes of the inputs."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dlog_g: Tensor
    dbeta: Tensor


def delta_rule_fwd(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Saved]:
    """o [B, G, R, T, Dv], the state after the last position [B, G, R, Dk, Dv], and what the backward needs.

    Starts from a zero state. bf16 inputs are computed in f32 and the state stays f32. Raises ValueError when the shapes
    don't meet.
    """
    _check(q, k, v, log_g, beta)
    dtype, (T, Dk), Dv = v.dtype, q.shape[2:], v.shape[-1]
    x = _chunks(*(widened(t) for t in (q, k, v, log_g, beta)))
    # Both products of keys are made once a key head; decay and beta bring in the value heads.
    gram = (x.k @ x.k.mT).tril_(-1)
    P = (x.q @ x.k.mT) * x.decay
    inverse = unit_lower_inverse((x.decay * x.beta).mul_(gram))
    right = x.v.new_empty(*x.v.shape[:-1], Dv + Dk)
    torch.mul(x.v, x.beta, out=right[..., :Dv])
    torch.mul(x.k, x.beta * x.from_start, out=right[..., Dv:])
    solved = inverse @ right
    end_key = x.to_end * x.k
    S, U = _states(solved, end_key, x.whole)
    out = ((x.from_start * x.q) @ S[:-1]).add_(P @ U)
    return _join(out, T).to(dtype), S[-1], Saved(x, T, dtype, out, gram, P, inverse, solved, end_key, U, S)


def _states(solved: Tensor, end_key: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """S [n + 1, B, G, R, Dk, Dv] from the first chunk to the last, and U [n, B, G, R, c, Dv]."""
    (n, *lead, c, Dk), Dv = end_key.shape, solved.shape[-1] - end_key.shape[-1]
    S, U = solved.new_empty(n + 1, *lead, Dk, Dv), solved.new_empty(n, *lead, c, Dv)
    S[0] = 0
    S_heads, U_heads, solved, end_key, whole = (t.flatten(1, 3) for t in (S, U, solved, end_key, whole))
    for i in range(n):
        torch.baddbmm(solved[i, :, :, :Dv], solved[i, :, :, Dv:], S_heads[i], alpha=-1, out=U_heads[i])
        torch.mul(whole[i], S_heads[i], out=S_heads[i + 1]).baddbmm_(end_key[i].mT, U_heads[i])
    return S, U


def delta_rule_bwd(dout: Tensor, saved: Saved) -> Grads:
    """Gradients of delta_rule_fwd for dout [B, G, R, T, Dv] (none for the final state). Raises ValueError on shapes."""
    x, S, U = saved.chunks, saved.S, saved.U
    T, Dv = saved.rows, U.shape[-1]
    if dout.shape != (*U.shape[1:4], T, Dv):
        raise ValueError(f"delta_rule: dout {tuple(dout.shape)}, expected {(*U.shape[1:4], T, Dv)}")
    dO = _cut(widened(dout))
    decayed_dO = x.from_start * dO
    dU, dS, end = _state_gradients(dO, decayed_dO, saved)
    dsolved = torch.empty_like(saved.solved)
    dsolved[..., :Dv] = dU
    torch.neg(dU @ S[:-1].mT, out=dsolved[..., Dv:])
    dright = saved.inverse.mT @ dsolved
    dright_v, right_k = dright[..., :Dv], dright[..., Dv:] * x.from_start

    # dP and -dL times the decay that both products carry; sums over the value heads before the products of keys.
    dscores = (dO @ U.mT).mul_(x.decay).sum(3, keepdim=True)
    dgram = (dright @ saved.solved.mT).mul_(x.decay)
    dbeta = _dot(dright_v, x.v) + _dot(right_k, x.k) - _dot(dgram, saved.gram)
    dgram = dgram.mul_(x.beta).sum(3, keepdim=True).tril_(-1)
    dq = (decayed_dO @ S[:-1].mT).sum(3, keepdim=True).add_(dscores @ x.k)
    dk = right_k.mul_(x.beta)
    dk[:-1].addcmul_(U[:-1] @ dS[1:].mT, x.to_end[:-1])
    dk = dk.sum(3, keepdim=True).add_(dscores.mT @ x.q).sub_((dgram + dgram.mT) @ x.k)
    dv = dright_v * x.beta

    dG = _dot(dO, saved.out).sub_(_dot(dv, x.v)).double()
    dG[..., -1:, :] += end
    dlog_g = dG.flip(-2).cumsum(-2).flip(-2)
    dq, dk, dv, dlog_g, dbeta = (_join(t, T).to(saved.dtype) for t in (dq, dk, dv, dlog_g, dbeta))
    return Grads(dq.squeeze(2), dk.squeeze(2), dv, dlog_g.squeeze(-1), dbeta.squeeze(-1))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last axis of a * b, kept as an axis of 1."""
    product: Tensor = torch.linalg.vecdot(a, b)
    return product.unsqueeze(-1)


def _state_gradients(dO: Tensor, decayed_dO: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dU [n, .., c, Dv], the state's gradient dS before each chunk [n, .., Dk, Dv], and <S', dS'> [n, .., 1, 1]."""
    x, Dv = saved.chunks, dO.shape[-1]
    dU, dS = saved.P.mT @ dO, x.q.mT @ decayed_dO
    end = torch.zeros_like(x.whole)
    solved_k = saved.solved[..., Dv:].flatten(1, 3)
    dU_heads, dS_heads, S_heads, end_key, whole, end_heads = (
        t.flatten(1, 3) for t in (dU, dS, saved.S, saved.end_key, x.whole, end)
    )
    last = dO.shape[0] - 1
    for i in range(last, -1, -1):
        if i < last:
            after = dS_heads[i + 1]
            dU_heads[i].baddbmm_(end_key[i], after)
            dS_heads[i].addcmul_(whole[i], after)
            end_heads[i, :, 0, 0] = torch.linalg.vecdot(S_heads[i + 1].flatten(1), after.flatten(1))
        dS_heads[i].baddbmm_(solved_k[i].mT, dU_heads[i], alpha=-1)
    return dU, dS, end


def delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """o and the next state for one position: q, k [B, G, Dk], v [B, G, R, Dv], log_g, beta [B, G, R].

    The state of bf16 inputs is f32. Raises ValueError when the shapes don't meet.
    """
    dtype = v.dtype
    _check_step(state, q, k, v, log_g, beta)
    q, k, v, log_g, beta = (widened(x) for x in (q, k, v, log_g, beta))
    state = state * log_g.exp()[..., None, None]
    key = k[:, :, None, :, None]
    u = beta.unsqueeze(-1) * (v - (state * key).sum(-2))
    state = state + key * u.unsqueeze(-2)
    return (state * q[:, :, None, :, None]).sum(-2).to(dtype), state


def _check_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> None:
    fits = state.dim() == 5 and q.shape == k.shape == (*state.shape[:2], state.shape[3])
    if not fits or v.shape != (*state.shape[:3], state.shape[4]) or not log_g.shape == beta.shape == state.shape[:3]:
        raise ValueError(
            f"delta_rule_step: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, log_g {tuple(log_g.shape)}, "
            f"beta {tuple(beta.shape)} don't meet state {tuple(state.shape)}"
        )


def _cut(x: Tensor) -> Tensor:
    """[B, G, R, T, X] -> [n, B, G, R, c, X], zeros at the end: k = 0 and beta = 0 leave the state, log g = 0 keeps it.

    c is a power of two.
    """
    T = x.shape[-2]
    c = min(CHUNK, 1 << (T - 1).bit_length())
    n = -(-T // c)
    if n * c != T:
        x = torch.cat((x, x.new_zeros(*x.shape[:-2], n * c - T, x.shape[-1])), -2)
    return x.reshape(*x.shape[:-2], n, c, x.shape[-1]).movedim(-3, 0).contiguous()


def _join(x: Tensor, T: int) -> Tensor:
    """The inverse of `_cut`."""
    return x.movedim(0, -3).flatten(-3, -2)[..., :T, :]


def _check(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> None:
    fits = q.dim() == 4 and v.dim() == 5 and q.shape == k.shape and v.shape[:2] == q.shape[:2]
    if not fits or v.shape[3] != q.shape[2] or log_g.shape != v.shape[:4] or beta.shape != v.shape[:4]:
        raise ValueError(
            f"delta_rule: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, log_g {tuple(log_g.shape)}, "
            f"beta {tuple(beta.shape)} don't meet"
        )
