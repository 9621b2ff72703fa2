"""Matrix product with a weight stored [out, in], and its two gradients.

    y = x W^T + b          x [N, I], W [O, I], b [O], y [N, O]
    dx = dy W              dW = dy^T x

The bias is frozen in every use here, so it gets no gradient. `out=` writes into a given buffer (a slice of the flat
gradient, for one), which saves a pass over memory.
"""

from __future__ import annotations

from torch import Tensor

from cortiq_fcd.kernels.products import addmm, mm


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y = x W^T + b. Nothing needs saving beyond the arguments. Raises ValueError when the shapes don't meet."""
    _check(x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1], x, weight)
    if bias is not None:
        _check(bias.shape == weight.shape[:1], bias, weight)
    if bias is None:
        return mm(x, weight.T, out=out)
    return addmm(bias, x, weight.T, out=out)


def linear_bwd_input(dy: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """dx = dy W."""
    _check(dy.dim() == weight.dim() == 2 and dy.shape[1] == weight.shape[0], dy, weight)
    return mm(dy, weight, out=out)


def linear_bwd_weight(dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """dW = dy^T x, summed over rows."""
    _check(dy.dim() == x.dim() == 2 and dy.shape[0] == x.shape[0], dy, x)
    return mm(dy.T, x, out=out)


def _check(ok: bool, a: Tensor, b: Tensor) -> None:
    if not ok:
        raise ValueError(f"linear: shapes {tuple(a.shape)} and {tuple(b.shape)} don't meet")
