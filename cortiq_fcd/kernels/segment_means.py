"""Contiguous segment means of the first `prefix` rows: the landmarks of the Nystrom kernel.

    y_i = mean of rows i*P//m .. (i+1)*P//m - 1          (P = prefix, m segments)
    dx_t += dy_i / length_i for t in segment i; rows from P on get nothing

x [..., T, D], y [..., m, D]; sums of bf16 are f32. Source: Xiong et al. 2021 (Nystromformer, arXiv 2102.03902).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _bounds(prefix: int, segments: int) -> list[int]:
    if not 1 <= segments <= prefix:
        raise ValueError(f"segment_means: {segments} segments of {prefix} rows")
    return [i * prefix // segments for i in range(segments + 1)]


def _lengths(prefix: int, segments: int, device: torch.device) -> Tensor:
    return torch.tensor(_bounds(prefix, segments), device=device).diff()


def segment_means_fwd(x: Tensor, prefix: int, segments: int) -> Tensor:
    """Means of the segments of x[..., :prefix, :]. Raises ValueError unless 1 <= segments <= prefix <= T."""
    if prefix > x.shape[-2]:
        raise ValueError(f"segment_means: prefix {prefix} of {x.shape[-2]} rows")
    bounds = _bounds(prefix, segments)
    if prefix % segments == 0:
        equal: Tensor = x[..., :prefix, :].view(*x.shape[:-2], segments, prefix // segments, x.shape[-1]).mean(-2)
        return equal
    return torch.stack([x[..., a:b, :].mean(-2) for a, b in pairwise(bounds)], dim=-2)


def segment_means_bwd(dy: Tensor, prefix: int) -> Tensor:
    """Gradient rows 0 .. prefix - 1, [..., prefix, D]: dy [..., m, D] spread evenly over each segment."""
    lengths = _lengths(prefix, dy.shape[-2], dy.device)
    return torch.repeat_interleave(dy / lengths[:, None], lengths, dim=-2, output_size=prefix)
