"""Cross-entropy and KL to a teacher over a frozen output head, in chunks of rows.

    z_s = h_s W_s^T, z_t = h_t W_t^T  [z = cap tanh(z / cap)]      h [N, C], W [V, C]; p = softmax(z)
    ce = mean_n(lse(z_s) - z_s[target]);   kl = mean_n sum_v p_t (log p_t - log p_s)
    L = (1 - w) ce + w kl;   dz_s = ((1 - w)(p_s - onehot) + w (p_s - p_t)) / N  [* (1 - (z_s / cap)^2)]
    dh_s = dz_s W_s;   in brackets: with a soft cap

A temperature tau other than 1 softens both sides of the KL, and its square keeps the gradient's size (Hinton, Vinyals
and Dean 2015, arXiv 1503.02531): kl = tau^2 KL(softmax(z_t / tau) || softmax(z_s / tau)), whose dz_s is tau times the
difference of these two.

Logits of a chunk live only while the chunk is worked on, all chunks in one piece of memory. Between the products that
make and use them they are visited a few rows at a time, which stay in a core's cache from the first pass to the last.
When teacher and student share the head, their rows share one product. The head and the teacher get no gradient.

With x = z - max z, e = exp(x), total = sum e:  kl = ln total_s - ln total_t + sum_v e_t (x_t - x_s) / total_t. Equal
logits give exactly 0; the noise is that of the sums, about one ulp of 1 a row whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.products import mm
from cortiq_fcd.kernels.widen import widened, widened_dtype

# Memory for the logits of a chunk, and how many sets of them there are: the student's and the teacher's.
CHUNK_BYTES = 160 << 20
COPIES = 2
# Logits visited at a time, of each of the two: with a temporary they fit into the second caches of two cores.
PART_BYTES = 1 << 20


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
    temperature: float = 1.0,
    budget_bytes: int = CHUNK_BYTES,
) -> Loss:
    """Loss and its gradient for student, teacher [N, C], head [V, C], targets [N] (int64).

    `temperature` is that of the KL. `teacher_head` [V, C] only when the teacher has a head of its own; the soft caps
    are of the student's and of the teacher's logits. Raises ValueError when the shapes don't meet.
    """
    _check(student, head, targets)
    _check_teacher(student, teacher, head, teacher_head)
    N = student.shape[0]
    if N == 0:
        raise ValueError("ce_kl: no rows to take a mean over")
    dhidden = torch.empty_like(student)
    most = chunk_rows(head.shape[0], student.element_size(), COPIES, budget_bytes)
    rows = -(-N // -(-N // most))  # of the fewest chunks of equal size
    room = student.new_empty(COPIES * rows, head.shape[0])
    figures = []
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        z_s, z_t = _logits(student[chunk], teacher[chunk], head, teacher_head, room)
        for part in _parts(z_s):
            target = targets[chunk][part, None]
            if temperature != 1:
                caps = softcap, teacher_softcap
                found, dz = _tempered(z_s[part], z_t[part], target, kl_weight, temperature, *caps)
                figures.append(found)
                z_s[part] = dz
                continue
            visited = _visit(z_s[part], z_t[part], target, softcap, teacher_softcap)
            figures.append(visited.figures)
            dz = _dz_(visited, target, kl_weight)
            if dz.dtype != z_s.dtype:
                z_s[part] = dz
        mm(z_s, head, out=dhidden[chunk])
    ce, kl = _losses(torch.cat(figures), temperature)
    return Loss(ce.mean().item(), kl.mean().item(), dhidden.div_(N))


@dataclass(frozen=True)
class _Visited:
    """Some rows: e of student and teacher [n, V]; x_s[target], total_s, total_t, sum e_t (x_s - x_t) [n, 4].

    `slope` is the derivative of the student's soft cap.
    """

    e_s: Tensor
    e_t: Tensor
    figures: Tensor
    slope: Tensor | None


def _parts(logits: Tensor) -> Iterator[slice]:
    rows = chunk_rows(logits.shape[1], _logit_bytes(logits), 1, PART_BYTES)
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _visit(z_s: Tensor, z_t: Tensor, target: Tensor, softcap: float | None, teacher_softcap: float | None) -> _Visited:
    """Logits that are not bf16 are used up."""
    s, t = _capped_(widened(z_s), softcap), _capped_(widened(z_t), teacher_softcap)
    slope = None if softcap is None else 1 - (s / softcap).square_()
    s.sub_(s.amax(-1, keepdim=True))
    t.sub_(t.amax(-1, keepdim=True))
    difference, target_x = s - t, s.gather(1, target)
    sums = (s.exp_(), t.exp_(), difference.mul_(t))
    return _Visited(s, t, torch.cat((target_x, *(x.sum(-1, keepdim=True) for x in sums)), 1), slope)


def _dz_(visited: _Visited, target: Tensor, kl_weight: float) -> Tensor:
    """N times the gradient of the student's logits, in the place of e_s."""
    total_s, total_t = visited.figures[:, 1:2], visited.figures[:, 2:3]
    dz = visited.e_s.div_(total_s).sub_(visited.e_t.div_(total_t), alpha=kl_weight)
    dz.scatter_add_(1, target, torch.full_like(target, kl_weight - 1, dtype=dz.dtype))
    return dz if visited.slope is None else dz.mul_(visited.slope)


def _losses(figures: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """ce and kl of each row, [N] in f64. Behind the four figures of ce there may be four of a tempered kl."""
    target_x, total_s, *_ = figures[:, :4].double().unbind(1)
    _, soft_s, soft_t, along = figures[:, -4:].double().unbind(1)
    kl = (soft_s.log() - soft_t.log() - along / soft_t).clamp_min_(0)
    return total_s.log() - target_x, kl if temperature == 1 else kl * temperature**2


def _tempered(
    z_s: Tensor,
    z_t: Tensor,
    target: Tensor,
    kl_weight: float,
    temperature: float,
    softcap: float | None,
    teacher_softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Figures of some rows, [n, 8], and N times the gradient of the student's logits [n, V]."""
    s, t = _capped_(widened(z_s).clone(), softcap), _capped_(widened(z_t).clone(), teacher_softcap)
    slope = None if softcap is None else 1 - (s / softcap).square_()
    soft = _visit(s / temperature, t / temperature, target, None, None)
    plain = _visit(s, t, target, None, None)
    figures = torch.cat((plain.figures, soft.figures), 1)
    dz = _dz_(plain, target, 0.0).mul_(1 - kl_weight)
    total_s, total_t = soft.figures[:, 1:2], soft.figures[:, 2:3]
    dz.add_(soft.e_s.div_(total_s).sub_(soft.e_t.div_(total_t)), alpha=kl_weight * temperature)
    return figures, dz if slope is None else dz.mul_(slope)


def kl_rows(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    *,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """KL(teacher || student) of each row, [N], for student and teacher [N, C] (one chunk: 2 N V logits).

    Raises ValueError when the shapes don't meet.
    """
    _check(student, head)
    _check_teacher(student, teacher, head, teacher_head)
    z_s, z_t = _logits(student, teacher, head, teacher_head, student.new_empty(2 * student.shape[0], head.shape[0]))
    none = torch.zeros(student.shape[0], 1, dtype=torch.int64, device=student.device)
    visits = (_visit(z_s[part], z_t[part], none[part], softcap, teacher_softcap) for part in _parts(z_s))
    return _losses(torch.cat([visited.figures for visited in visits]))[1].to(widened_dtype(student.dtype))


def kl_sum(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    *,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> float:
    """Sum of `kl_rows` over rows [N, C], in nats, a chunk at a time. Raises ValueError when the shapes don't meet."""
    size = chunk_rows(head.shape[0], head.element_size(), COPIES)
    caps = {"softcap": softcap, "teacher_softcap": teacher_softcap}
    pairs = zip(torch.split(student, size), torch.split(teacher, size), strict=True)
    sums = (kl_rows(s, t, head, teacher_head=teacher_head, **caps).sum(dtype=torch.float64) for s, t in pairs)
    return sum(total.item() for total in sums)


def nll_sum(
    hidden: Tensor, head: Tensor, targets: Tensor, *, softcap: float | None = None, budget_bytes: int = CHUNK_BYTES
) -> float:
    """Sum over rows of -log softmax(hidden head^T)[target], in nats: hidden [N, C], head [V, C], targets [N].

    Raises ValueError when the shapes don't meet.
    """
    _check(hidden, head, targets)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rows = chunk_rows(head.shape[0], hidden.element_size(), 1, budget_bytes)
    room = hidden.new_empty(min(rows, hidden.shape[0]), head.shape[0])
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, min(start + rows, hidden.shape[0]))
        logits = mm(hidden[chunk], head.T, out=room[: chunk.stop - start])
        for part in _parts(logits):
            z = _capped_(widened(logits[part]), softcap)
            target_logit = z.gather(1, targets[chunk][part, None])
            total += (torch.logsumexp(z, -1, keepdim=True) - target_logit).sum(dtype=torch.float64)
    return float(total)


def _logits(
    student: Tensor, teacher: Tensor, head: Tensor, teacher_head: Tensor | None, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits of student and teacher, [n, V] each, in the memory of `room` [2 n or more, V]."""
    n = student.shape[0]
    z_s, z_t = room[:n], room[n : 2 * n]
    if teacher_head is None:
        mm(torch.cat((student, teacher)), head.T, out=room[: 2 * n])
    else:
        mm(student, head.T, out=z_s)
        mm(teacher, teacher_head.T, out=z_t)
    return z_s, z_t


def _logit_bytes(hidden: Tensor) -> int:
    """Bytes of a logit: products of bf16 are bf16, everything after them is f32."""
    return widened_dtype(hidden.dtype).itemsize


def _capped_(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


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
