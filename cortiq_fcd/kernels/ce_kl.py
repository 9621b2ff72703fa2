"""Cross-entropy and KL to a teacher over a frozen output head, in chunks of rows.

    z_s = h_s W_s^T, z_t = h_t W_t^T  [z = cap tanh(z / cap)]      h [N, C], W [V, C]; p = softmax(z)
    ce = mean_n(lse(z_s) - z_s[target]);   kl = mean_n sum_v p_t (log p_t - log p_s)
    L = (1 - w) ce + w kl;   dz_s = ((1 - w)(p_s - onehot) + w (p_s - p_t)) / N  [* (1 - (z_s / cap)^2)]
    dh_s = dz_s W_s;   in brackets: with a soft cap

Logits of a chunk live only while the chunk is worked on. When teacher and student share the head, their rows share one
product. The head and the teacher get no gradient. KL is evaluated as -sum p_t d + (sum p_s - sum p_t),
d = log p_s - log p_t: the second term is 0 in exact arithmetic and cancels, to first order, the rounding of the two
log-sum-exps. What is left is the rounding of the probabilities: about one ulp of 1 a row, whatever the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.products import mm
from cortiq_fcd.kernels.widen import widened, widened_dtype

# Memory for the logits of a chunk and their temporaries, all together.
CHUNK_BYTES = 160 << 20
# Student logits, teacher logits and the two temporaries of the same size alive (three with a soft cap).
_LIVE_COPIES = 4


@dataclass(frozen=True)
class Loss:
    """Means over the rows, unweighted, in nats; dhidden [N, C] is the gradient of (1 - w) ce + w kl."""

    ce: float
    kl: float
    dhidden: Tensor


def chunk_rows(vocab: int, element_bytes: int, copies: int, budget_bytes: int = CHUNK_BYTES) -> int:
    """Rows whose logits, `copies` times, fit into the budget (at least one)."""
    return max(1, budget_bytes // (vocab * element_bytes * copies))


def ce_kl(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    targets: Tensor,
    kl_weight: float,
    *,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    budget_bytes: int = CHUNK_BYTES,
) -> Loss:
    """Loss and its gradient for student, teacher [N, C], head [V, C], targets [N] (int64).

    `teacher_head` [V, C] only when the teacher has a head of its own; the soft caps are of the student's and of the
    teacher's logits. Raises ValueError when the shapes don't meet.
    """
    _check(student, head, targets)
    _check_teacher(student, teacher, head, teacher_head)
    N = student.shape[0]
    if N == 0:
        raise ValueError("ce_kl: no rows to take a mean over")
    dhidden = torch.empty_like(student)
    ce = torch.zeros((), dtype=torch.float64, device=student.device)
    kl = torch.zeros_like(ce)
    copies = _LIVE_COPIES if softcap is None else _LIVE_COPIES + 1
    rows = chunk_rows(head.shape[0], _logit_bytes(student), copies, budget_bytes)
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        logits = _logits(student[chunk], teacher[chunk], head, teacher_head, softcap, teacher_softcap)
        sums = _chunk(logits, head, targets[chunk, None], kl_weight, softcap, dhidden[chunk])
        del logits
        ce += sums[0]
        kl += sums[1]
    return Loss(float(ce) / N, float(kl) / N, dhidden.div_(N))


def _chunk(
    logits: tuple[Tensor, Tensor],
    head: Tensor,
    target: Tensor,
    kl_weight: float,
    softcap: float | None,
    dhidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sums of ce and kl over a chunk, whose logits are used up; writes N times its gradient into dhidden.

    A function of its own so that a chunk's temporaries are gone before the next chunk's are made.
    """
    z_s, z_t = logits
    slope = None if softcap is None else 1 - (z_s / softcap).square_()
    log_ratio = z_s - z_t
    p_s, lse_s, target_logit = _softmax_(z_s, target)
    p_t, lse_t, _ = _softmax_(z_t, target)
    rows_kl = _kl(p_s, p_t, log_ratio, lse_s, lse_t)
    dz = p_s.sub_(p_t, alpha=kl_weight)
    dz.scatter_add_(1, target, torch.full_like(target, kl_weight - 1, dtype=dz.dtype))
    mm((dz if slope is None else dz.mul_(slope)).to(head.dtype), head, out=dhidden)
    return (lse_s - target_logit).sum(dtype=torch.float64), rows_kl.sum(dtype=torch.float64)


def _kl(p_s: Tensor, p_t: Tensor, log_ratio: Tensor, lse_s: Tensor, lse_t: Tensor) -> Tensor:
    """KL of each row, [n]; log_ratio arrives as z_s - z_t and is used up."""
    log_ratio += (lse_t - lse_s).to(log_ratio.dtype)
    rows: Tensor = p_s.sum(-1) - p_t.sum(-1) - torch.linalg.vecdot(p_t, log_ratio)
    return rows.clamp_min_(0)


def kl_rows(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    *,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """KL(teacher || student) of each row, [N], for student and teacher [N, C] (one chunk: N * V logits).

    Raises ValueError when the shapes don't meet.
    """
    _check(student, head)
    _check_teacher(student, teacher, head, teacher_head)
    z_s, z_t = _logits(student, teacher, head, teacher_head, softcap, teacher_softcap)
    none = torch.zeros(student.shape[0], 1, dtype=torch.int64, device=student.device)
    log_ratio = z_s - z_t
    p_s, lse_s, _ = _softmax_(z_s, none)
    p_t, lse_t, _ = _softmax_(z_t, none)
    return _kl(p_s, p_t, log_ratio, lse_s, lse_t)


def nll_sum(
    hidden: Tensor, head: Tensor, targets: Tensor, *, softcap: float | None = None, budget_bytes: int = CHUNK_BYTES
) -> float:
    """Sum over rows of -log softmax(hidden head^T)[target], in nats: hidden [N, C], head [V, C], targets [N].

    Raises ValueError when the shapes don't meet.
    """
    _check(hidden, head, targets)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rows = chunk_rows(head.shape[0], _logit_bytes(hidden), 2, budget_bytes)
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        logits = _capped_(widened(mm(hidden[chunk], head.T)), softcap)
        target_logit = logits.gather(1, targets[chunk, None])
        total += (torch.logsumexp(logits, -1, keepdim=True) - target_logit).sum(dtype=torch.float64)
    return float(total)


def _logits(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    teacher_head: Tensor | None,
    softcap: float | None,
    teacher_softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if teacher_head is None:
        both = widened(mm(torch.cat((student, teacher)), head.T))
        z_s, z_t = both[: student.shape[0]], both[student.shape[0] :]
    else:
        z_s, z_t = widened(mm(student, head.T)), widened(mm(teacher, teacher_head.T))
    return _capped_(z_s, softcap), _capped_(z_t, teacher_softcap)


def _logit_bytes(hidden: Tensor) -> int:
    """Bytes of a logit: products of bf16 are bf16, everything after them is f32."""
    return widened_dtype(hidden.dtype).itemsize


def _capped_(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _softmax_(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax in place; also the log-sum-exp in f64 and the target's logit, [n, 1] each."""
    target_logit = logits.gather(1, target)
    top = logits.amax(-1, keepdim=True)
    total = logits.sub_(top).exp_().sum(-1, keepdim=True)
    return logits.div_(total), top.double() + total.double().log(), target_logit


def _check(hidden: Tensor, head: Tensor, targets: Tensor | None = None) -> None:
    if hidden.dim() != 2 or head.dim() != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"ce_kl: rows {tuple(hidden.shape)} and head {tuple(head.shape)} don't meet")
    if targets is not None and targets.shape != hidden.shape[:1]:
        raise ValueError(f"ce_kl: rows {tuple(hidden.shape)} and targets {tuple(targets.shape)} don't meet")


def _check_teacher(student: Tensor, teacher: Tensor, head: Tensor, teacher_head: Tensor | None) -> None:
    if teacher.shape != student.shape:
        raise ValueError(f"ce_kl: student {tuple(student.shape)} and teacher {tuple(teacher.shape)} don't meet")
    if teacher_head is not None and teacher_head.shape != head.shape:
        raise ValueError(f"ce_kl: head {tuple(head.shape)} and teacher head {tuple(teacher_head.shape)} don't meet")
