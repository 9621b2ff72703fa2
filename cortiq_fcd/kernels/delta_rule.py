"""The gated delta rule, chunk-parallel (WY form).

    S <- g_t S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T q_t

Within a chunk that begins with state S0, with G the running sum of log g and D[t, i] = exp(G_t - G_i):

    (I + L) U = beta V - beta e^G K S0,   L[t, i] = beta_t D[t, i] (k_t . k_i), i < t
    O = e^G Q S0 + P U,   P[t, i] = D[t, i] (q_t . k_i), i <= t
    S' = e^{G_end} S0 + (e^{G_end - G} K)^T U

so that, with (I + L)^-1 applied to beta V and beta e^G K for all chunks at once, only S goes from chunk to chunk. The
backward runs the state's gradient from the last chunk to the first in the same way; everything else is again one batch.
Only differences of log decays that are <= 0 are exponentiated, so no decay is too strong.

q, k [B, G, T, Dk] (normalised); v [B, G, R, T, Dv]: R value heads share a key head; log_g, beta [B, G, R, T]; n chunks
of c positions. Source: Yang et al. 2024 (Gated Delta Networks, arXiv 2412.06464); docs/maths.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Positions a chunk: the c x c systems cost T c, the states T / c.
CHUNK = 64


@dataclass(frozen=True)
class _Chunks:
    """Inputs cut into chunks; all [B, G, R, n, c, .] but q and k, which have no R."""

    q: Tensor  # [B, G, n, c, Dk]
    k: Tensor  # [B, G, n, c, Dk]
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
    # G reaches hundreds at strong decay, and its differences must keep their digits: f64 up to the exponential.
    G = _cut(log_g.double().unsqueeze(-1)).cumsum(-2)
    difference = G - G.mT
    above = torch.ones(difference.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return _Chunks(
        q=_cut(q),
        k=_cut(k),
        v=_cut(v),
        beta=_cut(beta.unsqueeze(-1)),
        from_start=G.exp().to(q.dtype),
        to_end=(G[..., -1:, :] - G).exp().to(q.dtype),
        decay=difference.masked_fill_(above, -torch.inf).exp().to(q.dtype),
    )


@dataclass(frozen=True)
class Saved:
    """What the backward needs: chunked inputs, the solved right sides, and the state at the start of each chunk."""

    chunks: _Chunks
    rows: int
    L: Tensor  # [.., c, c], strictly lower
    P: Tensor  # [.., c, c], lower
    solved_v: Tensor  # (I + L)^-1 beta V, [.., c, Dv]
    solved_k: Tensor  # (I + L)^-1 beta e^G K, [.., c, Dk]
    U: Tensor  # [.., c, Dv]
    S: Tensor  # [.., Dk, Dv]


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

    Starts from a zero state. Raises ValueError when the shapes don't meet.
    """
    _check(q, k, v, log_g, beta)
    rows = q.shape[2]
    x = _chunks(q, k, v, log_g, beta)
    key = x.k.unsqueeze(2)
    L = (key @ key.mT * x.decay * x.beta).tril_(-1)
    P = x.q.unsqueeze(2) @ key.mT * x.decay
    right = torch.cat((x.beta * x.v, x.beta * x.from_start * key), -1)
    solved = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
    solved_v, solved_k = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    end_key = x.to_end * key

    state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    states, us = [], []
    for i in range(x.v.shape[3]):
        states.append(state)
        us.append(solved_v[..., i, :, :] - solved_k[..., i, :, :] @ state)
        state = x.whole[..., i, :, :] * state + end_key[..., i, :, :].mT @ us[-1]
    S, U = torch.stack(states, 3), torch.stack(us, 3)
    out = (x.from_start * x.q.unsqueeze(2)) @ S + P @ U
    return out.flatten(3, 4)[..., :rows, :], state, Saved(x, rows, L, P, solved_v, solved_k, U, S)


def delta_rule_bwd(dout: Tensor, saved: Saved) -> Grads:
    """Gradients of delta_rule_fwd for dout [B, G, R, T, Dv] (none for the final state)."""
    x, S, U, L, P = saved.chunks, saved.S, saved.U, saved.L, saved.P
    q, key = x.q.unsqueeze(2), x.k.unsqueeze(2)
    end_key = x.to_end * key
    dO = _cut(dout)
    dU, dnext = _state_gradients(dO, saved, x.from_start * q, end_key)

    dP = dO @ U.mT
    dsolved = torch.cat((dU, -(dU @ S.mT)), -1)
    dright = torch.linalg.solve_triangular(L.mT, dsolved, upper=True, unitriangular=True)
    dright_v, dright_k = torch.split(dright, [U.shape[-1], key.shape[-1]], -1)
    dL = -(dright_v @ saved.solved_v.mT + dright_k @ saved.solved_k.mT)

    # Each factor's gradient; what multiplies exp(G_t - G_i) also moves G.
    dscores = dP * x.decay
    dgram = (dL * x.decay * x.beta).tril_(-1)
    dlogP, dlogL = dP * P, dL * L
    query_e, right_k, end_grad = x.from_start * (dO @ S.mT), x.from_start * dright_k, U @ dnext.mT
    dq = (dscores @ key + query_e).sum(2)
    dk = (dscores.mT @ q + (dgram + dgram.mT) @ key + x.beta * right_k + x.to_end * end_grad).sum(2)
    dbeta = torch.linalg.vecdot(dright_v, x.v) + torch.linalg.vecdot(right_k, key)
    dbeta += (dL * (key @ key.mT * x.decay).tril_(-1)).sum(-1)
    to_end = (end_grad * end_key).sum(-1, keepdim=True)
    dG = (dlogP + dlogL).sum(-1, keepdim=True) - (dlogP + dlogL).sum(-2).unsqueeze(-1)
    dG += (query_e * q + x.beta * right_k * key).sum(-1, keepdim=True) - to_end
    dG[..., -1:, :] += to_end.sum(-2, keepdim=True) + x.whole * (S * dnext).sum((-1, -2))[..., None, None]
    dlog_g = dG.flip(-2).cumsum(-2).flip(-2)
    parts = (t.flatten(-3, -2)[..., : saved.rows, :] for t in (dq, dk, x.beta * dright_v, dlog_g, dbeta.unsqueeze(-1)))
    dq, dk, dv, dlog_g, dbeta = parts
    return Grads(dq, dk, dv, dlog_g.squeeze(-1), dbeta.squeeze(-1))


def delta_rule_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """o and the next state for one position: q, k [B, G, Dk], v [B, G, R, Dv], log_g, beta [B, G, R]."""
    state = state * log_g.exp()[..., None, None]
    key = k[:, :, None, :, None]
    u = beta.unsqueeze(-1) * (v - (state * key).sum(-2))
    state = state + key * u.unsqueeze(-2)
    return (state * q[:, :, None, :, None]).sum(-2), state


def _state_gradients(dO: Tensor, saved: Saved, decayed_q: Tensor, end_key: Tensor) -> tuple[Tensor, Tensor]:
    """dU [.., n, c, Dv] and the gradient of the state at the end of each chunk [.., n, Dk, Dv], last chunk first."""
    dU = saved.P.mT @ dO
    dnext = torch.zeros_like(saved.S)
    from_out = decayed_q.mT @ dO
    for i in reversed(range(dO.shape[3])):
        dU[..., i, :, :] += end_key[..., i, :, :] @ dnext[..., i, :, :]
        if i:
            dnext[..., i - 1, :, :] = (
                from_out[..., i, :, :]
                + saved.chunks.whole[..., i, :, :] * dnext[..., i, :, :]
                - saved.solved_k[..., i, :, :].mT @ dU[..., i, :, :]
            )
    return dU, dnext


def _cut(x: Tensor) -> Tensor:
    """[.., T, X] -> [.., n, c, X], zeros at the end: k = 0 and beta = 0 leave the state alone, log g = 0 keeps it."""
    T = x.shape[-2]
    c = min(CHUNK, T)
    n = -(-T // c)
    if n * c != T:
        x = torch.cat((x, x.new_zeros(*x.shape[:-2], n * c - T, x.shape[-1])), -2)
    return x.reshape(*x.shape[:-2], n, c, x.shape[-1])


def _check(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> None:
    fits = q.dim() == 4 and v.dim() == 5 and q.shape == k.shape and v.shape[:2] == q.shape[:2]
    if not fits or v.shape[3] != q.shape[2] or log_g.shape != v.shape[:4] or beta.shape != v.shape[:4]:
        raise ValueError(
            f"delta_rule: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, log_g {tuple(log_g.shape)}, "
            f"beta {tuple(beta.shape)} don't meet"
        )
