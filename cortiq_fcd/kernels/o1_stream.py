"""The served form of the O(1) kernel: a state of constant size, one token at a time, for a batch of sequences.

After an exact prompt pass the seal freezes the landmarks Qt, Kt and M, keeps the first `sink` keys for ever and the
last w keys in a ring, and moves every older key into the far accumulators

    T_hat_b = sum_j exp(Qt_b k_j scale - run_b) v_j;   Z_hat_b = sum_j exp(Qt_b k_j scale - run_b)

with run_b the running maximum of landmark b. A step moves the key that leaves the ring into the accumulators, puts the
new key into its slot, and then attends: near weights over sinks and ring, far weights U_b = (exp(q Kt^T scale) M)_b on
the accumulators, dropped as a whole when sum_b U_b Z_hat_b < 0; one joint division. It is the same function as the rows
after the seal of `o1_attention`.

q [B, G, R, D]; k, v [B, G, D] for one token; the prompt's have a T axis before D. The state of bf16 inputs is f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from cortiq_fcd.kernels.o1_attention import MIN_DENOMINATOR, landmarks
from cortiq_fcd.kernels.widen import widened


@dataclass
class StreamState:
    """One layer's state. It is updated in place: copying a ring per token would cost more than the attention."""

    scale: float
    sink: int
    slot: int  # where in the ring the oldest key lies
    M: Tensor  # [B, G, R, m, m] f64
    scaled_Qt: Tensor  # [B, G, R, m, D]
    scaled_Kt: Tensor  # [B, G, m, D]
    near_k: Tensor  # [B, G, sink + w, D]: the sinks, then the ring
    near_v: Tensor  # [B, G, sink + w, Dv]
    T_hat: Tensor  # [B, G, R, m, Dv]
    Z_hat: Tensor  # [B, G, R, m]
    run: Tensor  # [B, G, R, m]

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes; it does not depend on how many tokens were seen."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def seal_stream(
    q: Tensor, k: Tensor, v: Tensor, *, landmark_count: int, window: int, sink: int, scale: float
) -> StreamState:
    """The state after an exact prompt pass with q [B, G, R, T, D], k [B, G, T, D], v [B, G, T, Dv].

    Raises ValueError when the prompt leaves nothing to the far field (the caller then stays on exact attention).
    """
    T = k.shape[2] if k.dim() == 4 else 0
    fits = q.dim() == 5 and k.dim() == v.dim() == 4
    if not fits or (*q.shape[:2], *q.shape[3:]) != k.shape or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"seal_stream: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} don't meet")
    if window < 1 or sink < 0:
        raise ValueError(f"seal_stream: window {window}, sink {sink}")
    if window + sink >= T:
        raise ValueError(f"seal_stream: a prompt of {T} tokens does not reach past window {window} + sink {sink}")
    q, k, v = (widened(x) for x in (q, k, v))
    Qt, Kt = landmarks(q, k, T, landmark_count)
    M = landmark_inverse(Qt, Kt[:, :, None], scale)
    old_k, old_v = k[:, :, sink : T - window], v[:, :, sink : T - window]
    scaled_Qt = Qt.mul_(scale)
    logits = scaled_Qt @ old_k[:, :, None].mT
    run = logits.amax(-1)
    weights = (logits - run[..., None]).exp_()
    return StreamState(
        scale=scale,
        sink=sink,
        slot=0,
        M=M,
        scaled_Qt=scaled_Qt,
        scaled_Kt=Kt.mul_(scale),
        near_k=torch.cat((k[:, :, :sink], k[:, :, T - window :]), 2),
        near_v=torch.cat((v[:, :, :sink], v[:, :, T - window :]), 2),
        T_hat=weights @ old_v[:, :, None],
        Z_hat=weights.sum(-1),
        run=run,
    )


def stream_step(state: StreamState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention output [B, G, R, Dv] of the next token; the state moves on by one. Raises ValueError on shapes."""
    fits = k.shape == (*state.near_k.shape[:2], state.near_k.shape[3])
    fits = fits and v.shape == (*state.near_v.shape[:2], state.near_v.shape[3])
    if not fits or q.shape != (*state.M.shape[:3], k.shape[2]):
        raise ValueError(
            f"stream_step: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} don't meet the state"
        )
    dtype, (q, k, v) = q.dtype, (widened(x) for x in (q, k, v))
    _advance(state, k, v)
    near_logits = (q * state.scale) @ state.near_k.mT
    near_top = near_logits.amax(-1, keepdim=True)

    logits = (q @ state.scaled_Kt.mT).double()
    row_top = logits.amax(-1, keepdim=True)
    U = ((logits - row_top).exp_().unsqueeze(-2) @ state.M).squeeze(-2)
    log_scale = row_top + state.run.double()
    far_top = (U.abs().log_() + log_scale).amax(-1, keepdim=True)
    far_top = torch.where(far_top.isfinite(), far_top, near_top)
    far_weights = (U * (log_scale - far_top).exp_()).to(q.dtype)
    keep = (far_weights * state.Z_hat).sum(-1, keepdim=True) >= 0
    top = torch.where(keep, torch.maximum(near_top, far_top.to(near_top.dtype)), near_top)
    far_weights *= torch.where(keep, (far_top - top).exp(), 0.0).to(q.dtype)

    near_weights = (near_logits - top).exp_()
    den = near_weights.sum(-1, keepdim=True) + (far_weights * state.Z_hat).sum(-1, keepdim=True)
    num = near_weights @ state.near_v + (far_weights.unsqueeze(-2) @ state.T_hat).squeeze(-2)
    return num.div_(den.clamp_min_(MIN_DENOMINATOR)).to(dtype)


def _advance(state: StreamState, k: Tensor, v: Tensor) -> None:
    """Move the oldest key of the ring into the far accumulators, and the new key into its slot."""
    at = state.sink + state.slot
    logits = (state.scaled_Qt @ state.near_k[:, :, at, None, :, None]).squeeze(-1)
    run = torch.maximum(state.run, logits)
    decay, weight = (state.run - run).exp_(), (logits - run).exp_()
    state.Z_hat.mul_(decay).add_(weight)
    state.T_hat.mul_(decay.unsqueeze(-1)).addcmul_(weight.unsqueeze(-1), state.near_v[:, :, at, None, None])
    state.run = run
    state.near_k[:, :, at] = k
    state.near_v[:, :, at] = v
    state.slot = (state.slot + 1) % (state.near_k.shape[2] - state.sink)
