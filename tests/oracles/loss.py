"""Cross-entropy and KL with all logits at once, in f64 log space."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(hidden: Tensor, head: Tensor) -> Tensor:
    return torch.log_softmax(hidden.double() @ head.double().T, -1)


def ce(student: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return -log_probabilities(student, head).gather(1, targets[:, None])[:, 0]


def kl(student: Tensor, teacher: Tensor, head: Tensor, teacher_head: Tensor | None = None) -> Tensor:
    """KL(teacher || student) of each row; a teacher probability of 0 contributes 0."""
    log_s = log_probabilities(student, head)
    log_t = log_probabilities(teacher, head if teacher_head is None else teacher_head)
    return torch.where(log_t.isneginf(), 0.0, log_t.exp() * (log_t - log_s)).sum(-1)


def loss(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    targets: Tensor,
    kl_weight: float,
    teacher_head: Tensor | None = None,
) -> Tensor:
    return (1 - kl_weight) * ce(student, head, targets).mean() + kl_weight * kl(
        student, teacher, head, teacher_head
    ).mean()
