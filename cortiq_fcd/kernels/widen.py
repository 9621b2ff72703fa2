"""Half precision in, f32 inside: where logits, exponentials, sums and states are delicate.

A kernel widens its inputs at its entry and narrows its results at its exit. f32 and f64 pass through untouched, at no
cost.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in f32 if it has fewer bits, else x itself."""
    return x.float() if x.element_size() < 4 else x


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that `widened` gives."""
    return torch.promote_types(dtype, torch.float32)
