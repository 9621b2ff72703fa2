"""Exact causal attention in blocks of query rows, optionally over a window of recent keys, with or without a soft cap.

    s = q k^T scale;   z = s, or cap tanh(s / cap);   P = softmax_j(z), j <= t (and t - j < window);   out = P v
    dv = P^T dout;   dP = dout v^T;   dz = P (dP - delta), delta = sum_j P dP = dout . out
    ds = dz, or dz (1 - (z / cap)^2);   dq = ds k scale;   dk = ds^T q scale

q [B, G, R, T, D]; k [B, G, T, D]; v [B, G, T, Dv]: R query heads share a kv head, and k, v are never repeated. Only
the maximum and the sum of each row are kept; P is recomputed block by block in the backward: nothing is T x T.
Source: Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.widen import widened

# Query rows a block. Small blocks skip more of the masked half, large ones give the matrix products more to do.
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Saved:
    """Inputs, the output, each row's largest scaled logit `top` and `total` = sum exp(logit - top), [B, G, R, T, 1].

    The two are kept apart because their log-sum-exp would lose digits at large logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    top: Tensor
    total: Tensor
    scale: float
    window: int | None
    softcap: float | None
    dtype: torch.dtype  # of the inputs; what is kept is at least f32


@dataclass(frozen=True)
class Grads:
    """Gradients with the shapes of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def causal_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Saved]:
    """Attention output [B, G, R, T, Dv]; bf16 is computed in f32. Raises ValueError when the shapes don't meet."""
    _check(q, k, v, window)
    dtype, (q, k, v) = q.dtype, (widened(x) for x in (q, k, v))
    B, G, R, T, _ = q.shape
    out = q.new_empty(B, G, R, T, v.shape[-1])
    tops, totals = q.new_empty(B, G, R, T, 1), q.new_empty(B, G, R, T, 1)
    for rows, keys, mask in _blocks(T, window, q.device):
        logits = _logits(q, k, scale, softcap, rows, keys).masked_fill_(mask, -torch.inf)
        top = torch.amax(logits, -1, keepdim=True, out=tops[..., rows, :])
        weights = logits.sub_(top).exp_()
        total = torch.sum(weights, -1, keepdim=True, out=totals[..., rows, :])
        block = (weights.view(B, G, -1, weights.shape[-1]) @ v[:, :, keys]).view(B, G, R, -1, v.shape[-1])
        torch.div(block, total, out=out[..., rows, :])
    return out.to(dtype), Saved(q, k, v, out, tops, totals, scale, window, softcap, dtype)


def causal_attention_bwd(dout: Tensor, saved: Saved) -> Grads:
    """Gradients of causal_attention_fwd for dout [B, G, R, T, Dv]. Raises ValueError when dout has another shape."""
    if dout.shape != saved.out.shape:
        raise ValueError(f"causal_attention: dout {tuple(dout.shape)} and out {tuple(saved.out.shape)} don't meet")
    q, k, v, scale = saved.q, saved.k, saved.v, saved.scale
    B, G, R, T, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # exp(logit - top) lacks the factor 1 / total; dout and delta carry it instead, which is a smaller pass.
    dout = widened(dout) / saved.total
    delta = torch.linalg.vecdot(dout, saved.out).unsqueeze(-1)
    for rows, keys, mask in _blocks(T, saved.window, q.device):
        logits = _logits(q, k, scale, saved.softcap, rows, keys)
        slope = None if saved.softcap is None else 1 - (logits / saved.softcap).square_()
        weights = logits.masked_fill_(mask, -torch.inf).sub_(saved.top[..., rows, :]).exp_()
        weights = weights.view(B, G, -1, weights.shape[-1])
        dout_rows = dout[..., rows, :].reshape(B, G, -1, dout.shape[-1])
        dv[:, :, keys] += weights.mT @ dout_rows
        dlogits = (dout_rows @ v[:, :, keys].mT).sub_(delta[..., rows, :].reshape(B, G, -1, 1)).mul_(weights)
        if slope is not None:
            dlogits.mul_(slope.view(dlogits.shape))
        dq[..., rows, :] = (dlogits @ k[:, :, keys]).view(B, G, R, -1, D)
        dk[:, :, keys] += dlogits.mT @ q[..., rows, :].reshape(B, G, -1, D)
    return Grads(dq.mul_(scale).to(saved.dtype), dk.mul_(scale).to(saved.dtype), dv.to(saved.dtype))


def _blocks(T: int, window: int | None, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Query rows, the keys that they can see, and where a row must not look ([rows, keys], true = masked)."""
    for start in range(0, T, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, T)
        first = 0 if window is None else max(0, start - window + 1)
        t = torch.arange(start, stop, device=device)[:, None]
        j = torch.arange(first, stop, device=device)
        mask = j > t
        if window is not None:
            mask |= t - j >= window
        yield slice(start, stop), slice(first, stop), mask


def _logits(q: Tensor, k: Tensor, scale: float, softcap: float | None, rows: slice, keys: slice) -> Tensor:
    """Scaled and capped logits [B, G, R, rows, keys], before the mask."""
    B, G, R, _, D = q.shape
    block = (q[..., rows, :] * scale).reshape(B, G, -1, D) @ k[:, :, keys].mT
    return _capped_(block, softcap).view(B, G, R, -1, block.shape[-1])


def _capped_(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    fits = q.dim() == 5 and k.dim() == v.dim() == 4
    if not fits or (*q.shape[:2], *q.shape[3:]) != k.shape or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"causal_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} don't meet")
    if window is not None and window < 1:
        raise ValueError(f"causal_attention: window {window}")


def causal_attention_step(q: Tensor, k: Tensor, v: Tensor, scale: float, *, softcap: float | None = None) -> Tensor:
    """Attention output [B, G, R, Dv] of one new token q [B, G, R, D] over the keys that it sees, its own included.

    Raises ValueError when the shapes don't meet.
    """
    fits = q.dim() == k.dim() == v.dim() == 4
    if not fits or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"causal_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} don't meet")
    dtype, (q, k, v) = q.dtype, (widened(x) for x in (q, k, v))
    return (torch.softmax(_capped_((q * scale) @ k.mT, softcap), -1) @ v).to(dtype)
