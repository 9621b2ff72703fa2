"""The far field of the O(1) kernel: rank-m weights of old keys, as running sums over chunks of rows.

    weight of key j for row t = U_t . E_j,   U = exp(q Kt^T scale) M,   E = exp(Qt k^T scale)

Chunk i of c rows sees three kinds of far keys: the base (sink .. seal - w, far for every row) and the blocks 0 .. i - 1
(c keys each) only through S_i = sum_j E_j v_j and Z_i = sum_j E_j; the keys of block i become far within the chunk (key
u of the block is far for rows r > u) and are weighted one by one: the ramp.

    S_0 = base;   S_i = S_{i-1} + block_{i-1}           (each at the scale of its running per-landmark maximum)
    num_t = U_t S_i + sum_u ramp[t, u] v_u;   sum_t = U_t Z_i + sum_u ramp[t, u]

Shifts: F = exp(. - max over landmarks) a row; E = exp(. - max over keys) a landmark and block; one more shift per row,
the largest term among the keys that the row can see, brings its weights to at most 1. All shifts are constants of the
backward: they cancel in the kernel's quotient. The ramp is f64 throughout: a block's maximum may belong to a key that
is far for the last rows only, and in f32 it would flush the block's other keys, and with them the far field of the rows
before, to 0. F is f64 because M can outweigh it. Letters as in `o1_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Keys:
    """Far keys and values as slices of the padded window: base [B, G, K0, .] and blocks [B, G, n, c, .]."""

    base_k: Tensor
    base_v: Tensor
    block_k: Tensor
    block_v: Tensor


@dataclass(frozen=True)
class Far:
    """Far-field factors of all rows after the seal. Leading axes [B, G, n, R]; base_e has no n."""

    base_e: Tensor  # [B, G, R, m, K0]
    block_e: Tensor  # [.., m, c] f64
    S: Tensor  # [.., m, Dv]
    Z: Tensor  # [.., m]
    carry: Tensor  # [.., m]: S_i = carry_i S_{i-1} + entry_i block_{i-1}; unused at i = 0
    entry: Tensor  # [.., m]
    F: Tensor  # [.., c, m] f64
    base_factor: Tensor  # [.., c, m] f64: U -> base_w
    ramp_factor: Tensor  # [.., c, m] f64: U -> ramp_w
    base_w: Tensor  # [.., c, m]: weight of S_i
    ramp_w: Tensor  # [.., c, m] f64: weight of block i

    def scale_(self, by: Tensor) -> None:
        """Every row's weights times `by` [.., c, 1], in place (0 drops the row's far field, gradient included)."""
        for x in (self.base_factor, self.ramp_factor, self.base_w, self.ramp_w):
            x.mul_(by.to(x.dtype))


@dataclass(frozen=True)
class Grads:
    """Gradients of tail_q (scaled queries), of the landmarks, and of base and block keys and values."""

    dtail_q: Tensor
    dlandmark_q: Tensor
    dlandmark_k: Tensor
    dbase_k: Tensor
    dbase_v: Tensor
    dblock_k: Tensor
    dblock_v: Tensor


def far_field_fwd(tail_q: Tensor, keys: Keys, M: Tensor, scaled_Qt: Tensor, Kt: Tensor) -> tuple[Far, Tensor]:
    """Factors and the shift of each row, [B, G, n, R, c, 1] in f64, for tail_q [B, G, n, R, c, D] = scaled queries.

    The shift is -inf for a row without far field.
    scaled_Qt [B, G, R, m, D] = Qt * scale, Kt [B, G, m, D], M [B, G, R, m, m] f64.
    """
    B, G, n, R, c, D = tail_q.shape
    m = M.shape[-1]
    dtype = tail_q.dtype
    rows_Qt = scaled_Qt.reshape(B, G, R * m, D)
    base_e, base_top = _exp_((rows_Qt @ keys.base_k.mT).view(B, G, R, m, -1))
    block_logits = (rows_Qt[:, :, None] @ keys.block_k.mT).view(B, G, n, R, m, c)
    ramp_top = _ramp_top(block_logits)
    block_e, block_top = _exp_(block_logits.double())
    S, Z, run, carry, entry = _running_sums(base_e, base_top, block_e.to(dtype), block_top.to(dtype), keys)

    logits = (tail_q.reshape(B, G, n, R * c, D) @ Kt[:, :, None].mT).view(B, G, n, R, c, m)
    F, row_top = _exp_(logits.double())
    U = F @ M[:, :, None]
    row_top = row_top[..., None]
    # The largest term that a row sees, but for the row's own row_top, which every term has.
    seen = torch.maximum(run[..., None, :], ramp_top)
    top = U.abs().log_().add_(seen).amax(-1, keepdim=True)
    # A row whose U is 0 throughout has no far field: its top is -inf, and any finite shift will do.
    shift = torch.where(top == -torch.inf, -row_top, top)
    base_factor = (run[..., None, :] - shift).exp_()
    # Above 700 only where the block's largest key is still near: its weight is masked, but must not be inf * 0.
    ramp_factor = (block_top[..., None, :] - shift).clamp_max_(700).exp_()
    base_w, ramp_w = (U * base_factor).to(dtype), U * ramp_factor
    return Far(base_e, block_e, S, Z, carry, entry, F, base_factor, ramp_factor, base_w, ramp_w), top + row_top


def far_field_bwd(
    far: Far,
    g: Tensor,
    delta: Tensor,
    dramp: Tensor,
    tail_q: Tensor,
    keys: Keys,
    M: Tensor,
    scaled_Qt: Tensor,
    Kt: Tensor,
) -> Grads:
    """Backward from g = dout / den [.., c, Dv], delta = g . out [.., c, 1], dramp [.., c, c] f64 (ramp weights)."""
    B, G, n, R, c, D = tail_q.shape
    m, Dv = M.shape[-1], g.shape[-1]
    dbase_w = (g @ far.S.mT).sub_(delta * far.Z.unsqueeze(-2))
    dramp_w = dramp @ far.block_e.mT
    dU = dbase_w.double().mul_(far.base_factor).add_(dramp_w.mul_(far.ramp_factor))
    dlogits = (dU @ M[:, :, None].mT).mul_(far.F).to(g.dtype).view(B, G, n, R * c, m)
    dtail_q = (dlogits @ Kt[:, :, None]).view(tail_q.shape)
    dKt = (dlogits.mT @ tail_q.reshape(B, G, n, R * c, D)).sum(2)

    dbase_S, dbase_Z, dblock_S, dblock_Z = _running_sums_bwd(far.base_w.mT @ g, -(far.base_w.mT @ delta), far)
    rows_Qt = scaled_Qt.reshape(B, G, R * m, D)
    dbase_e = (dbase_S.view(B, G, R * m, Dv) @ keys.base_v.mT).add_(dbase_Z.view(B, G, R * m, 1))
    dbase_e.mul_(far.base_e.view(dbase_e.shape))
    dblock_e = (dblock_S.view(B, G, n, R * m, Dv) @ keys.block_v.mT).add_(dblock_Z.view(B, G, n, R * m, 1))
    dramp_e = (far.ramp_w.mT @ dramp).view(dblock_e.shape)
    dblock_e = dramp_e.add_(dblock_e).mul_(far.block_e.view(dblock_e.shape)).to(g.dtype)
    dQt = (dbase_e @ keys.base_k).add_((dblock_e @ keys.block_k).sum(2))
    return Grads(
        dtail_q=dtail_q,
        dlandmark_q=dQt.view(B, G, R, m, D),
        dlandmark_k=dKt,
        dbase_k=dbase_e.mT @ rows_Qt,
        dbase_v=far.base_e.view(B, G, R * m, -1).mT @ dbase_S.view(B, G, R * m, Dv),
        dblock_k=dblock_e.mT @ rows_Qt[:, :, None],
        dblock_v=far.block_e.view(B, G, n, R * m, c).mT.to(g.dtype) @ dblock_S.view(B, G, n, R * m, Dv),
    )


def _exp_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logits - max over the last axis), in the place of the logits, and that maximum."""
    top = logits.amax(-1)
    return logits.sub_(top[..., None]).exp_(), top


def _ramp_top(block_logits: Tensor) -> Tensor:
    """Largest logit [.., c, m] among the keys u < r of the block [.., m, c], for each row r; -inf for row 0."""
    by_key = block_logits.mT
    top = by_key.new_empty(by_key.shape)
    top[..., 0, :] = -torch.inf
    top[..., 1:, :] = by_key[..., :-1, :]
    # A running maximum by doubling: after each pass a row knows of twice as many keys. (cummax also tells which: slow.)
    reach = 1
    while reach < top.shape[-2]:
        top[..., reach:, :] = torch.maximum(top[..., reach:, :], top[..., :-reach, :])
        reach *= 2
    return top


def _running_sums(
    base_e: Tensor, base_top: Tensor, block_e: Tensor, block_top: Tensor, keys: Keys
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """S, Z, the running maxima that they are scaled by, and the factors carry and entry (see `Far`)."""
    B, G, n, R, m, c = block_e.shape
    base_S = (base_e.view(B, G, R * m, -1) @ keys.base_v).view(B, G, R, m, -1)
    block_S = (block_e.view(B, G, n, R * m, c) @ keys.block_v).view(B, G, n, R, m, -1)
    block_Z = block_e.sum(-1)
    # The block that enters at chunk i is i - 1; the last block enters nowhere.
    tops = torch.cat((base_top[:, :, None], block_top[:, :, :-1]), 2)
    run = tops.cummax(2).values
    entry = (tops - run).exp_()
    carry = torch.cat((torch.ones_like(entry[:, :, :1]), (run[:, :, :-1] - run[:, :, 1:]).exp_()), 2)
    S, Z = torch.empty_like(block_S), torch.empty_like(block_Z)
    S[:, :, 0], Z[:, :, 0] = base_S, base_e.sum(-1)
    for i in range(1, n):
        torch.mul(S[:, :, i - 1], carry[:, :, i, ..., None], out=S[:, :, i])
        S[:, :, i].addcmul_(block_S[:, :, i - 1], entry[:, :, i, ..., None])
        Z[:, :, i] = Z[:, :, i - 1] * carry[:, :, i] + block_Z[:, :, i - 1] * entry[:, :, i]
    return S, Z, run, carry, entry


def _running_sums_bwd(dS: Tensor, dZ: Tensor, far: Far) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the base sums [B, G, R, m, .] and block sums [B, G, n, R, m, .] from dS and dZ [.., m, 1]."""
    n = dS.shape[2]
    dblock_S, dblock_Z = torch.zeros_like(dS), torch.zeros_like(dZ)
    for i in range(n - 1, 0, -1):
        entry, carry = far.entry[:, :, i, ..., None], far.carry[:, :, i, ..., None]
        torch.mul(dS[:, :, i], entry, out=dblock_S[:, :, i - 1])
        torch.mul(dZ[:, :, i], entry, out=dblock_Z[:, :, i - 1])
        dS[:, :, i - 1].addcmul_(dS[:, :, i], carry)
        dZ[:, :, i - 1].addcmul_(dZ[:, :, i], carry)
    return dS[:, :, 0].contiguous(), dZ[:, :, 0].contiguous(), dblock_S, dblock_Z
