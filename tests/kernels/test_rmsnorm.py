from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cortiq_fcd.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from tests.oracles import norms as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_no_worse_than, autograd

SIZES = [(1, 1), (1, 7), (13, 1), (11, 17), (64, 48)]
EPS = 1e-5


def case(N: int, C: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((N, C), (C,), (N, C)))
    return x, weight, dy


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_oracle_and_finite_differences(size: tuple[int, int], plus_one: bool) -> None:
    x, weight, dy = case(*size)
    unchanged = Unchanged(x, weight, dy)
    want, (dx, dw) = autograd(lambda x, w: oracle.rmsnorm(x, w, EPS, plus_one), (x, weight), dy)
    y, saved = rmsnorm_fwd(x, weight, EPS, plus_one=plus_one)
    grads = rmsnorm_bwd(dy, saved)
    assert_close("y", y, want, 1e-13)
    # With one column y hardly depends on x, and dx is what is left of a cancellation: compare it with the larger dw.
    largest = max(dx.abs().max().item(), dw.abs().max().item())
    assert (grads.dx - dx).abs().max() < 1e-13 * largest
    assert_close("dw", grads.dw, dw, 1e-13)
    unchanged.check()
    if x.numel() < 1000:
        forward = lambda x, w: rmsnorm_fwd(x, w, EPS, plus_one=plus_one)[0]  # noqa: E731
        assert_differences("rmsnorm", forward, (x, weight), (grads.dx, grads.dw), dy)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_low_precision_is_no_worse_than_torch(dtype: torch.dtype, magnitude: float, plus_one: bool) -> None:
    x, weight, dy = (a.to(dtype) for a in case(61, 127))
    x = x * magnitude

    def torch_op(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight + 1 if plus_one else weight, EPS)

    want, wanted = autograd(torch_op, (x.double(), weight.double()), dy.double())
    rival, rivals = autograd(torch_op, (x, weight), dy)
    y, saved = rmsnorm_fwd(x, weight, EPS, plus_one=plus_one)
    grads = rmsnorm_bwd(dy, saved)
    assert_no_worse_than("y", y, rival, want)
    assert_no_worse_than("dx", grads.dx, rivals[0], wanted[0])
    assert_no_worse_than("dw", grads.dw, rivals[1], wanted[1])


def test_a_zero_row_is_finite() -> None:
    x, weight, dy = case(3, 5)
    x[1] = 0
    y, saved = rmsnorm_fwd(x, weight, EPS, plus_one=False)
    grads = rmsnorm_bwd(dy, saved)
    assert (y[1] == 0).all()
    assert_close("dx", grads.dx[1], dy[1] * weight / EPS**0.5, 1e-13)


def test_bad_shapes_are_refused() -> None:
    x, weight, dy = case(5, 3)
    for bad_x, bad_weight in ((x, weight[:2]), (x[0], weight), (x[None], weight), (x, weight[:1]), (x, weight[None])):
        with pytest.raises(ValueError, match="rmsnorm"):
            rmsnorm_fwd(bad_x, bad_weight, EPS, plus_one=False)
    _, saved = rmsnorm_fwd(x, weight, EPS, plus_one=False)
    for bad_dy in (dy[:1], dy[0], dy[:, :1], dy.T):
        with pytest.raises(ValueError, match="rmsnorm"):
            rmsnorm_bwd(bad_dy, saved)
