from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cortiq_fcd.kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from tests.oracles import linear as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_no_worse_than, autograd

SIZES = [(1, 1, 1), (1, 7, 5), (7, 1, 3), (5, 3, 1), (13, 11, 17), (64, 32, 48)]


def case(N: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N, inputs), (outputs, inputs), (outputs,), (N, outputs))
    x, weight, bias, dy = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, weight, bias, dy


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_oracle(size: tuple[int, int, int], biased: bool) -> None:
    x, weight, bias, dy = case(*size)
    unchanged = Unchanged(x, weight, bias, dy)
    chosen = bias if biased else None
    y, (dx, dw) = autograd(lambda x, w: oracle.linear(x, w, chosen), (x, weight), dy)
    assert_close("y", linear_fwd(x, weight, chosen), y, 1e-13)
    assert_close("dx", linear_bwd_input(dy, weight), dx, 1e-13)
    assert_close("dW", linear_bwd_weight(dy, x), dw, 1e-13)
    unchanged.check()


@pytest.mark.parametrize("size", SIZES[:5])
def test_finite_differences(size: tuple[int, int, int]) -> None:
    x, weight, bias, dy = case(*size)
    grads = linear_bwd_input(dy, weight), linear_bwd_weight(dy, x)
    assert_differences("linear", lambda x, w: linear_fwd(x, w, bias), (x, weight), grads, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_no_worse_than_torch(dtype: torch.dtype) -> None:
    rounded = [a.to(dtype) for a in case(67, 129, 95)]
    x, weight, bias, dy = rounded
    want, wanted = autograd(functional.linear, [a.double() for a in (x, weight, bias)], dy.double())
    rival, rivals = autograd(functional.linear, (x, weight, bias), dy)
    assert_no_worse_than("y", linear_fwd(x, weight, bias), rival, want)
    assert_no_worse_than("dx", linear_bwd_input(dy, weight), rivals[0], wanted[0])
    assert_no_worse_than("dW", linear_bwd_weight(dy, x), rivals[1], wanted[1])


def test_out_is_written() -> None:
    x, weight, bias, dy = case(5, 3, 4)
    flat = torch.full((100,), 7.0, dtype=torch.float64)
    y, dx, dw = flat[:20].view(5, 4), flat[20:35].view(5, 3), flat[40:52].view(4, 3)
    linear_fwd(x, weight, bias, out=y)
    linear_bwd_input(dy, weight, out=dx)
    linear_bwd_weight(dy, x, out=dw)
    assert torch.equal(y, linear_fwd(x, weight, bias))
    assert torch.equal(dx, linear_bwd_input(dy, weight))
    assert torch.equal(dw, linear_bwd_weight(dy, x))
    assert (flat[35:40] == 7).all()
    assert (flat[52:] == 7).all()


def test_bad_shapes_are_refused() -> None:
    x, weight, bias, dy = case(5, 3, 4)
    for call in (
        lambda: linear_fwd(x, weight.T),
        lambda: linear_fwd(x[0], weight),
        lambda: linear_fwd(x, weight[0]),
        lambda: linear_fwd(x[None], weight),
        lambda: linear_fwd(x, weight, bias[:3]),
        lambda: linear_fwd(x, weight, bias[:1]),
        lambda: linear_bwd_input(dy.T, weight),
        lambda: linear_bwd_input(dy, weight[0]),
        lambda: linear_bwd_weight(dy[:4], x),
        lambda: linear_bwd_weight(dy, x[0]),
    ):
        with pytest.raises(ValueError, match="linear"):
            call()
