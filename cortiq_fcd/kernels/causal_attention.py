"""Exact causal attention in blocks of query rows, optionally over a window of recent keys, with or without a soft cap.

    s = q k^T scale;   z = s, or cap tanh(s / cap);   P = softmax_j(z), j <= t (and t - j < window);   out = P v
    dv = P^T dout;   dP = dout v^T;   dz = P (dP - delta), delta = sum_j P dP = dout . out
    ds = dz, or dz (1 - (z / cap)^2);   dq = ds k scale;   dk = ds^T q scale

q [B, G, R, T, D]; k [B, G, T, D]; v [B, G, T, Dv]: R query heads share a kv head, and k, v are never repeated. Only
the maximum and the sum of each row are kept; P is recomputed block by block in the backward: nothing is T x T.
Source: Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cortiq_fcd.kernels.exponential import exp_shifted_
from cortiq_fcd.kernels.widen import widened

# Query rows a block. Small blocks skip more of the masked half, large ones give the matrix products more to do.
BLOCK_ROWS = 64
# Logits of a block, which takes as many sequences as fit (at least one): more than a cache holds is slower.
BLOCK_BYTES = 8 << 20


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
    room = _room(q, window)
    for block in _blocks(q, window):
        batch, rows, keys = block.batch, block.rows, block.keys
        merged = _logits(_rows(q, block) * scale, k, softcap, block, room)
        logits = block.mask_(_by_head(merged, R))
        top = torch.amax(logits, -1, keepdim=True, out=tops[batch, ..., rows, :])
        exp_shifted_(logits, top)
        total = torch.sum(logits, -1, keepdim=True, out=totals[batch, ..., rows, :])
        torch.div(_by_head(merged @ v[batch, :, keys], R), total, out=out[batch, ..., rows, :])
    return out.to(dtype), Saved(q, k, v, out, tops, totals, scale, window, softcap, dtype)


def causal_attention_bwd(dout: Tensor, saved: Saved) -> Grads:
    """Gradients of causal_attention_fwd for dout [B, G, R, T, Dv]. Raises ValueError when dout has another shape."""
    if dout.shape != saved.out.shape:
        raise ValueError(f"causal_attention: dout {tuple(dout.shape)} and out {tuple(saved.out.shape)} don't meet")
    q, k, v, scale, R = saved.q, saved.k, saved.v, saved.scale, saved.q.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # exp(logit - top) lacks the factor 1 / total; dout and delta carry it instead, which is a smaller pass.
    dout = widened(dout) / saved.total
    delta = torch.linalg.vecdot(dout, saved.out).unsqueeze(-1)
    room, second_room = _room(q, saved.window), _room(q, saved.window)
    for block in _blocks(q, saved.window):
        batch, rows, keys = block.batch, block.rows, block.keys
        q_rows, dout_rows = _rows(q, block).mul(scale), _rows(dout, block)
        weights = _logits(q_rows, k, saved.softcap, block, room)
        slope = None if saved.softcap is None else 1 - (weights / saved.softcap).square_()
        exp_shifted_(block.mask_(_by_head(weights, R)), saved.top[batch, ..., rows, :])
        dv[batch, :, keys] += weights.mT @ dout_rows
        dlogits = _product(dout_rows, v[batch, :, keys].mT, second_room)
        dlogits.sub_(_rows(delta, block)).mul_(weights)
        if slope is not None:
            dlogits.mul_(slope)
        dk[batch, :, keys] += dlogits.mT @ q_rows
        torch.mul(_by_head(dlogits @ k[batch, :, keys], R), scale, out=dq[batch, ..., rows, :])
    return Grads(dq.to(saved.dtype), dk.to(saved.dtype), dv.to(saved.dtype))


@dataclass(frozen=True)
class _Block:
    """Sequences, their query rows and the keys that those can see; `bias` [rows, columns] masks the last columns."""

    batch: slice
    rows: slice
    keys: slice
    bias: Tensor

    def mask_(self, logits: Tensor) -> Tensor:
        """logits [.., rows, keys] with -inf where a row must not look. (An added bias is a far faster pass than a
        masked fill.)"""
        logits[..., -self.bias.shape[1] :] += self.bias
        return logits


def _blocks(q: Tensor, window: int | None) -> Iterator[_Block]:
    B, T = q.shape[0], q.shape[3]
    row_blocks = []
    for start in range(0, T, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, T)
        first = 0 if window is None else max(0, start - window + 1)
        # Without a window every row sees all keys before the block's own.
        bias = _bias(stop - start, 0 if window is None else start - first, window, q.dtype, q.device)
        row_blocks.append((slice(start, stop), slice(first, stop), bias))
    together = _together(q, window)
    for b in range(0, B, together):
        for rows, keys, bias in row_blocks:
            yield _Block(slice(b, min(b + together, B)), rows, keys, bias)


@lru_cache(maxsize=8)
def _bias(rows: int, before: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 or -inf [rows, before + rows]: what rows see of their own keys and of `before` keys in front of them. Every
    layer asks for the same few."""
    t = torch.arange(rows, device=device)[:, None]
    j = torch.arange(-before, rows, device=device)
    hidden = j > t if window is None else (j > t) | (t - j >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _sequence_logits(q: Tensor, window: int | None) -> int:
    """Logits of the largest block of one sequence."""
    _, G, R, T, _ = q.shape
    rows = min(BLOCK_ROWS, T)
    return G * R * rows * (T if window is None else min(T, rows + window - 1))


def _together(q: Tensor, window: int | None) -> int:
    """Sequences a block."""
    return min(q.shape[0], max(1, BLOCK_BYTES // (_sequence_logits(q, window) * q.element_size())))


def _room(q: Tensor, window: int | None) -> Tensor:
    """Memory for one block's logits: a fresh allocation for each would cost as much as the product that fills it."""
    return q.new_empty(_together(q, window) * _sequence_logits(q, window))


def _product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b for [b, G, rows, X] and [b, G, X, keys], in the memory of `room`."""
    shape = (*a.shape[:-1], b.shape[-1])
    return torch.matmul(a, b, out=room[: math.prod(shape)].view(shape))


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The block's rows of x [B, G, R, T, X], query heads of a kv head one after the other: [b, G, R rows, X]."""
    return x[block.batch, ..., block.rows, :].flatten(2, 3)


def _by_head(x: Tensor, R: int) -> Tensor:
    """[b, G, R rows, X] -> [b, G, R, rows, X]."""
    return x.view(*x.shape[:2], R, -1, x.shape[-1])


def _logits(q_rows: Tensor, k: Tensor, softcap: float | None, block: _Block, room: Tensor) -> Tensor:
    """Capped logits [b, G, R rows, keys] of scaled query rows, before the mask."""
    return _capped_(_product(q_rows, k[block.batch, :, block.keys].mT, room), softcap)


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
