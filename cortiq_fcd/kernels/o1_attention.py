"""The O(1) joint attention kernel, teacher-forced over a window: what the served kernel computes, all rows at once.

The first `seal` rows (the prompt) are exact causal attention. With landmarks Qt, Kt (segment means of the prompt's q,
k) and M their ridge pseudo-inverse, every later row t has

    near(t, j) = t - j < w or j < sink;   far = the other causal j
    near weight exp(q_t k_j scale);   far weight exp(q_t Kt^T scale) M exp(Qt k_j scale), negative ones included
    guard: if the far weights of row t sum to less than 0, the row's far field is dropped, weights and gradient
    out_t = sum_j weight v_j / max(sum_j weight, 1e-30)

M is an argument and a constant. Shifts of the exponentials cancel in the quotient and carry no gradient. Backward, with
g = dout / den and delta = g . out:

    dweight[t, j] = g_t . v_j - delta_t;   dv_j = sum_t weight g_t;   near: dlogit = dweight * weight -> dq, dk
    far: see `o1_far_field`; the landmarks are linear in the prompt's rows, so their gradient lands there alone

The weights of a row sum to 1 but are not all positive, so out_t may be longer than every value it sums. Its gain is
|out_t| / max_j |v_j| over the window's values; a convex combination has at most 1. With a `gain_limit`, rows above it
get the gradient 0: they are computed as ever, and nothing is learnt through them.

Nothing is T x T: rows after the seal are cut into n chunks of c. A chunk sees the sinks and its band of w + c - 1 keys
directly. Of the band, row r has keys u = r .. r + w - 1 near; keys u < r have become far (the ramp). Older keys enter
as running sums. Derivation: docs/maths.md.

Axes: q [B, G, R, T, D], k [B, G, T, D], v [B, G, T, Dv], M [B, G, R, m, m] f64; K = sink + w + c - 1 keys a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_attention
from cortiq_fcd.kernels.exponential import exp_shifted_
from cortiq_fcd.kernels.o1_far_field import Far, Keys, far_field_bwd, far_field_fwd
from cortiq_fcd.kernels.segment_means import segment_means_bwd, segment_means_fwd
from cortiq_fcd.kernels.widen import widened

MIN_DENOMINATOR = 1e-30


@dataclass(frozen=True)
class Geometry:
    """seal (prompt rows), window w, permanent first keys `sink`, all in tokens; scale multiplies q k^T; `gain_limit`:
    rows of a larger gain have no gradient.
    """

    seal: int
    window: int
    sink: int
    scale: float
    gain_limit: float = math.inf

    @property
    def chunk(self) -> int:
        """Rows a chunk: half the window wastes a third of a band's products and keeps them large enough."""
        return min(max(self.window // 2, 16), 128)


@dataclass(frozen=True)
class Saved:
    """What the backward needs; k and v are padded to whole chunks."""

    geometry: Geometry
    k: Tensor
    v: Tensor
    M: Tensor
    scaled_Qt: Tensor
    Kt: Tensor
    prompt: causal_attention.Saved
    tail_q: Tensor  # [B, G, n, R, c, D], scaled
    weights: Tensor  # [B, G, n, R, c, K]
    den: Tensor  # [B, G, n, R, c, 1]
    tail_out: Tensor  # [B, G, n, R, c, Dv]
    gain: Tensor  # [B, G, n, R, c, 1]; 0 for padded rows
    far: Far
    rows: int  # T
    dtype: torch.dtype  # of the inputs; what is kept is at least f32


@dataclass(frozen=True)
class Grads:
    """Gradients with the shapes of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def landmarks(q: Tensor, k: Tensor, seal: int, count: int) -> tuple[Tensor, Tensor]:
    """Segment means Qt [B, G, R, m, D] and Kt [B, G, m, D] of the prompt's rows, in f32 at least.

    M is as ill-conditioned as 1e6: it and the kernel must see the same landmarks, not ones rounded to bf16.
    """
    return segment_means_fwd(widened(q), seal, count), segment_means_fwd(widened(k), seal, count)


def o1_attention_fwd(q: Tensor, k: Tensor, v: Tensor, M: Tensor, geometry: Geometry) -> tuple[Tensor, Saved]:
    """Attention output [B, G, R, T, Dv]; bf16 is computed in f32.

    Raises ValueError when the shapes don't meet, or when the prompt is too short for a far field.
    """
    _check(q, k, v, M, geometry)
    dtype, (q, k, v) = q.dtype, (widened(x) for x in (q, k, v))
    seal, c, sink = geometry.seal, geometry.chunk, geometry.sink
    T = q.shape[3]
    Qt, Kt = landmarks(q, k, seal, M.shape[-1])
    scaled_Qt = Qt.mul_(geometry.scale)
    prompt_out, prompt = causal_attention.causal_attention_fwd(
        q[..., :seal, :], k[:, :, :seal], v[:, :, :seal], geometry.scale
    )
    k, v = _padded(k, geometry), _padded(v, geometry)
    tail_q = _chunks(q[..., seal:, :] * geometry.scale, c)
    keys = _far_keys(k, v, geometry)
    near, ramp = _masks(geometry, q.device)
    hidden = q.new_zeros(near.shape).masked_fill_(~near, -torch.inf)
    far, far_top = far_field_fwd(tail_q, keys, M, scaled_Qt, Kt)
    ramp_weights = (far.ramp_w @ far.block_e).masked_fill_(~ramp, 0)
    far_sum = (far.base_w * far.Z.unsqueeze(-2)).sum(-1, keepdim=True) + ramp_weights.sum(-1, keepdim=True)

    # One shift a row for both fields, the larger of the two, so that no weight exceeds 1.
    logits = _merge(tail_q) @ _windows(k, geometry).mT
    logits = logits.view(*tail_q.shape[:-1], -1).add_(hidden)
    near_top = logits.amax(-1, keepdim=True)
    keep = far_sum >= 0
    top = torch.where(keep, torch.maximum(near_top, far_top.to(near_top.dtype)), near_top)
    far_scale = torch.where(keep, (far_top - top).exp(), 0.0)
    far.scale_(far_scale)
    weights = exp_shifted_(logits, top)
    weights[..., sink : sink + c] += ramp_weights.mul_(far_scale).to(weights.dtype)

    den = weights.sum(-1, keepdim=True) + (far.base_w * far.Z.unsqueeze(-2)).sum(-1, keepdim=True)
    den.clamp_min_(MIN_DENOMINATOR)
    num = (_merge(weights) @ _windows(v, geometry)).view(*tail_q.shape[:-1], -1)
    tail_out = num.add_(far.base_w @ far.S).div_(den)
    out = torch.cat((prompt_out, _flat(tail_out)[..., : T - seal, :]), -2)
    gain = _gain(tail_out, v, T - seal)
    saved = Saved(geometry, k, v, M, scaled_Qt, Kt, prompt, tail_q, weights, den, tail_out, gain, far, T, dtype)
    return out.to(dtype), saved


def _gain(tail_out: Tensor, v: Tensor, rows: int) -> Tensor:
    """Length of each row's output over that of the longest value, [B, G, n, R, c, 1]; 0 behind the last of `rows`."""
    n, c = tail_out.shape[2], tail_out.shape[4]
    longest = torch.linalg.vector_norm(v, dim=-1).amax(-1)[:, :, None, None, None, None]
    gain: Tensor = torch.linalg.vector_norm(tail_out, dim=-1, keepdim=True).div_(longest)
    real = (torch.arange(n * c, device=v.device) < rows).view(n, 1, c, 1)
    return gain.masked_fill_(~real, 0)


def o1_attention_bwd(dout: Tensor, saved: Saved) -> Grads:
    """Gradients of o1_attention_fwd for dout [B, G, R, T, Dv]; M is a constant.

    Raises ValueError when dout has another shape.
    """
    _check_dout(dout, saved)
    dout = widened(dout)
    geometry, tail_q, weights = saved.geometry, saved.tail_q, saved.weights
    seal, c, sink, T = geometry.seal, geometry.chunk, geometry.sink, saved.rows
    keys = _far_keys(saved.k, saved.v, geometry)
    near, ramp = _masks(geometry, dout.device)
    g = _chunks(dout[..., seal:, :], c) / saved.den
    if geometry.gain_limit < math.inf:
        g.masked_fill_(saved.gain > geometry.gain_limit, 0)
    delta = torch.linalg.vecdot(g, saved.tail_out).unsqueeze(-1)

    # Near keys and ramp share one weight matrix, at places that don't overlap.
    dweights = (_merge(g) @ _windows(saved.v, geometry).mT).view(weights.shape).sub_(delta)
    dramp = dweights[..., sink : sink + c].double() * ramp
    dlogits = dweights.mul_(weights).mul_(near)
    dk, dv = torch.zeros_like(saved.k), torch.zeros_like(saved.v)
    _add_windows(_merge(dlogits).mT @ _merge(tail_q), dk, geometry)
    _add_windows(_merge(weights).mT @ _merge(g), dv, geometry)
    far = far_field_bwd(saved.far, g, delta, dramp, tail_q, keys, saved.M, saved.scaled_Qt, saved.Kt)
    dtail_q = (_merge(dlogits) @ _windows(saved.k, geometry)).view(tail_q.shape).add_(far.dtail_q)
    base_end = seal - geometry.window + 1
    dk[:, :, sink:base_end] += far.dbase_k
    dv[:, :, sink:base_end] += far.dbase_v
    blocks = slice(base_end, base_end + far.dblock_k.shape[2] * c)
    dk[:, :, blocks] += far.dblock_k.flatten(2, 3)
    dv[:, :, blocks] += far.dblock_v.flatten(2, 3)

    prompt = causal_attention.causal_attention_bwd(dout[..., :seal, :], saved.prompt)
    dq_prompt = prompt.dq.add_(segment_means_bwd(far.dlandmark_q, seal), alpha=geometry.scale)
    dk[:, :, :seal] += prompt.dk.add_(segment_means_bwd(far.dlandmark_k, seal))
    dv[:, :, :seal] += prompt.dv
    dq = torch.cat((dq_prompt, _flat(dtail_q.mul_(geometry.scale))[..., : T - seal, :]), -2)
    return Grads(dq.to(saved.dtype), dk[:, :, :T].to(saved.dtype), dv[:, :, :T].to(saved.dtype))


def _chunks(x: Tensor, c: int) -> Tensor:
    """[B, G, R, rows, D] -> [B, G, n, R, c, D], zero rows at the end where c does not divide."""
    B, G, R, rows, D = x.shape
    n = -(-rows // c)
    if rows != n * c:
        x = torch.cat((x, x.new_zeros(B, G, R, n * c - rows, D)), -2)
    return x.reshape(B, G, R, n, c, D).transpose(2, 3).contiguous()


def _flat(x: Tensor) -> Tensor:
    """The inverse of `_chunks`, padding kept."""
    return x.transpose(2, 3).flatten(3, 4)


def _merge(x: Tensor) -> Tensor:
    """[B, G, n, R, c, X] -> [B, G, n, R * c, X]: query heads of a kv head become rows, so k and v are not repeated."""
    return x.flatten(3, 4)


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    """x [B, G, T, D] with its last row repeated up to whole chunks. Only padded query rows ever look at those rows."""
    missing = -(x.shape[2] - geometry.seal) % geometry.chunk
    return torch.cat((x, x[:, :, -1:].expand(-1, -1, missing, -1)), 2) if missing else x


def _far_keys(k: Tensor, v: Tensor, geometry: Geometry) -> Keys:
    c, base_end = geometry.chunk, geometry.seal - geometry.window + 1
    base = slice(geometry.sink, base_end)
    blocks = slice(base_end, base_end + k.shape[2] - geometry.seal)
    return Keys(
        k[:, :, base],
        v[:, :, base],
        torch.unflatten(k[:, :, blocks], 2, (-1, c)),
        torch.unflatten(v[:, :, blocks], 2, (-1, c)),
    )


def _windows(x: Tensor, geometry: Geometry) -> Tensor:
    """The keys (or values) that each chunk sees directly, [B, G, n, K, D]: the sinks, then its band."""
    base_end, length = geometry.seal - geometry.window + 1, geometry.window + geometry.chunk - 1
    band = x[:, :, base_end:].unfold(2, length, geometry.chunk).mT
    sinks = x[:, :, None, : geometry.sink].expand(-1, -1, band.shape[2], -1, -1)
    return torch.cat((sinks, band), 3)


def _add_windows(dwindows: Tensor, dx: Tensor, geometry: Geometry) -> None:
    """Add gradients of `_windows` [B, G, n, K, D] to dx [B, G, T, D]. Bands overlap, so this goes c keys at a time."""
    c, n = geometry.chunk, dwindows.shape[2]
    dx[:, :, : geometry.sink] += dwindows[:, :, :, : geometry.sink].sum(2)
    band = dwindows[:, :, :, geometry.sink :]
    start = geometry.seal - geometry.window + 1
    for u in range(0, band.shape[3], c):
        piece = band[:, :, :, u : u + c]
        rows = dx[:, :, start + u : start + u + n * c]
        if piece.shape[3] == c:
            rows += piece.flatten(2, 3)
        else:
            # The last piece is shorter than a chunk, and so is the room behind it.
            for i in range(n):
                rows[:, :, i * c : i * c + piece.shape[3]] += piece[:, :, i]


def _masks(geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """near [c, K] (sinks are always near) and ramp [c, c] (key u is far for row r > u); the same for every chunk."""
    c, w, sink = geometry.chunk, geometry.window, geometry.sink
    r = torch.arange(c, device=device)[:, None]
    u = torch.arange(-sink, w + c - 1, device=device)
    near = (u < 0) | ((u >= r) & (u < r + w))
    return near, (u[sink : sink + c] < r)


def _check(q: Tensor, k: Tensor, v: Tensor, M: Tensor, geometry: Geometry) -> None:
    fits = q.dim() == 5 and k.dim() == v.dim() == 4 and M.dim() == 5
    if not fits or (*q.shape[:2], *q.shape[3:]) != k.shape or k.shape[:3] != v.shape[:3] or M.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"o1_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, M {tuple(M.shape)} don't meet"
        )
    if M.shape[3] != M.shape[4]:
        raise ValueError(f"o1_attention: M {tuple(M.shape)} is not square")
    if M.dtype != torch.float64:
        raise ValueError(f"o1_attention: M must be f64, got {M.dtype}")
    if geometry.window < 1 or geometry.sink < 0 or not geometry.window + geometry.sink <= geometry.seal < q.shape[3]:
        raise ValueError(f"o1_attention: {geometry} leaves no far field in {q.shape[3]} rows")


def _check_dout(dout: Tensor, saved: Saved) -> None:
    B, G, _, R, _, Dv = saved.tail_out.shape
    if dout.shape != (B, G, R, saved.rows, Dv):
        raise ValueError(f"o1_attention: dout {tuple(dout.shape)}, expected {(B, G, R, saved.rows, Dv)}")
