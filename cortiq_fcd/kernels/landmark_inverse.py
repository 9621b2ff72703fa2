"""The ridge pseudo-inverse of the landmark kernel matrix, in f64.

    Au = exp(Qt Kt^T scale)                              [..., m, m]
    M  = (Au^T Au + lambda I)^-1 Au^T,   lambda = 1e-6 * mean(diag(Au^T Au))

by Cholesky; where that fails lambda grows tenfold, up to 12 tries, then M = I / mean(diag). M spans e^(+-|logits|), so
it stays f64. It is a constant of the training graph (the served kernel freezes it at the seal): no backward exists, and
the attention kernels take M as an argument.

lambda scales with Au^2, so M(c Au) = M(Au) / c for every c: the largest logit is taken out before exp and put back in
M, which keeps Au^T Au finite for logits far beyond +-350.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-6
MAX_TRIES = 12


def landmark_inverse(landmark_q: Tensor, landmark_k: Tensor, scale: float) -> Tensor:
    """M [..., m, m] in f64 from landmark_q, landmark_k [..., m, D] (leading axes broadcast).

    Raises ValueError when the shapes don't meet.
    """
    if landmark_q.dim() < 2 or landmark_q.shape[-2:] != landmark_k.shape[-2:]:
        raise ValueError(f"landmark_inverse: {tuple(landmark_q.shape)} and {tuple(landmark_k.shape)} don't meet")
    logits = landmark_q.double() @ landmark_k.double().mT * scale
    top = logits.amax((-1, -2), keepdim=True)
    kernel = (logits - top).exp()
    gram = kernel.mT @ kernel
    mean_diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    ridge = RIDGE * mean_diagonal
    factor, failed = torch.linalg.cholesky_ex(gram + ridge * eye)
    for _ in range(MAX_TRIES - 1):
        # A poisoned matrix (NaN weights) fails every try and takes the last resort below, as the spec says.
        bad = (failed != 0)[..., None, None]
        if not bool(bad.any()):
            break
        ridge = torch.where(bad, ridge * 10, ridge)
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * eye)
    inverse = torch.cholesky_solve(kernel.mT.contiguous(), factor)
    # Au^T Au carries the largest logit twice, so the last resort owes it twice.
    last_resort = eye / mean_diagonal * (-top).exp()
    return torch.where((failed != 0)[..., None, None], last_resort, inverse) * (-top).exp()
