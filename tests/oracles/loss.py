"""Cross-entropy and KL with all logits at once, in f64 log space."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(hidden: Tensor, head: Tensor, softcap: float | None = None) -> Tensor:
    logits = hidden.double() @ head.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits, -1)


def ce(student: Tensor, head: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Cross-entropy of each row."""
    return -log_probabilities(student, head, softcap).gather(1, targets[:, None])[:, 0]


def kl(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """KL(teacher || student) of each row; a teacher probability of 0 contributes 0."""
    log_s = log_probabilities(student, head, softcap)
    log_t = log_probabilities(teacher, head if teacher_head is None else teacher_head, teacher_softcap)
    return torch.where(log_t.isneginf(), 0.0, log_t.exp() * (log_t - log_s)).sum(-1)


def loss(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    targets: Tensor,
    kl_weight: float,
    teacher_head: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    kl_mean = kl(student, teacher, head, teacher_head, softcap, teacher_softcap).mean()
    return (1 - kl_weight) * ce(student, head, targets, softcap).mean() + kl_weight * kl_mean
