"""The inverse of unit lower triangular matrices, many at once.

    X = (I + L)^-1,   [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]

Diagonal blocks of BASE rows by forward substitution, all of them in one vector; then pairs of inverse blocks are merged
by two products until one is left. torch's batched triangular solve works through the matrices one by one and is several
times slower. The series (I - L)(I + L^2)(I + L^4).. would take as few products, but its terms can exceed their sum a
thousandfold (equal keys), which f32 does not survive; blocks of the inverse are as tame as the inverse.

L, X [..., c, c]; L is strictly lower: what stands elsewhere is not read, except within the diagonal blocks, where it
is ignored. No backward: X' = -X dL X is a matter of the caller's own products.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 8


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 for L [..., c, c], c a power of two. Raises ValueError on other shapes."""
    c = L.shape[-1] if L.dim() >= 2 else 0
    if c < 1 or L.shape[-2] != c or c & (c - 1):
        raise ValueError(f"unit_lower_inverse: {tuple(L.shape)} is not a stack of 2^n x 2^n matrices")
    size = min(BASE, c)
    inverse = _substituted(_diagonal_blocks(L, size))
    while size < c:
        lower_left = _diagonal_blocks(L, 2 * size)[:, size:, :size]
        upper, lower = inverse[0::2], inverse[1::2]
        inverse = L.new_zeros(lower.shape[0], 2 * size, 2 * size)
        inverse[:, :size, :size] = upper
        inverse[:, size:, size:] = lower
        inverse[:, size:, :size] = torch.bmm(torch.bmm(lower, lower_left), upper).neg_()
        size *= 2
    return inverse.view(L.shape)


def _diagonal_blocks(L: Tensor, size: int) -> Tensor:
    """[N c / size, size, size]: the blocks on the diagonal, matrix by matrix."""
    n = L.shape[-1] // size
    blocks = L.reshape(-1, n, size, n, size).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).flatten(0, 1)


def _substituted(blocks: Tensor) -> Tensor:
    """Inverses [N, s, s] of I + blocks, row by row: X_i = e_i - sum_{j < i} L_ij X_j."""
    size = blocks.shape[-1]
    # Blocks along the last axis: each step is one contiguous sweep over all of them.
    minus = blocks.permute(1, 2, 0).neg()
    rows = minus.new_zeros(minus.shape)
    rows.diagonal(dim1=0, dim2=1).fill_(1)
    for i in range(1, size):
        torch.sum(minus[i, :i, None] * rows[:i, :i], 0, out=rows[i, :i])
    return rows.permute(2, 0, 1).contiguous()
