from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.row_match import row_match
from tests.oracles import row_match as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, autograd

SIZES = [(1, 1), (1, 7), (13, 1), (11, 17)]


def case(N: int, C: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N)
    y, target = (torch.randn(N, C, generator=generator, dtype=torch.float64) for _ in range(2))
    return y, target * torch.logspace(0, 3, N, dtype=torch.float64)[:, None]  # rows of very different lengths


@pytest.mark.parametrize("size", SIZES)
def test_oracle_and_finite_differences(size: tuple[int, int]) -> None:
    y, target = case(*size)
    unchanged = Unchanged(y, target)
    one = torch.ones((), dtype=torch.float64)
    want, (dy,) = autograd(lambda y: oracle.row_match(y, target), (y,), one)
    match = row_match(y, target)
    assert match.loss == pytest.approx(want.item(), rel=1e-13)
    assert_close("dy", match.dy, dy, 1e-13)
    unchanged.check()
    forward = lambda y: torch.tensor(row_match(y, target).loss, dtype=torch.float64)  # noqa: E731
    assert_differences("row_match", forward, (y,), (match.dy,), one)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-7), (torch.bfloat16, 4e-3)])
def test_low_precision_is_rounded_once(dtype: torch.dtype, bound: float) -> None:
    y, target = (x.to(dtype) for x in case(61, 33))
    want, exact = row_match(y, target), row_match(y.double(), target.double())
    assert want.dy.dtype == dtype
    assert want.loss == pytest.approx(exact.loss, rel=1e-6)
    assert_close("dy", want.dy, exact.dy, bound)


def test_equal_rows_match_exactly_and_rows_of_zeros_stay_finite() -> None:
    y, target = case(5, 3)
    assert row_match(target, target).loss == 0
    assert not row_match(target, target).dy.any()
    target[2] = 0
    assert torch.isfinite(row_match(y, target).dy).all()


def test_bad_shapes_are_refused() -> None:
    y, target = case(5, 3)
    for bad in (target[:1], target[:, :2], target[0]):
        with pytest.raises(ValueError, match="row_match"):
            row_match(y, bad)
    with pytest.raises(ValueError, match="row_match"):
        row_match(y[:0], target[:0])
