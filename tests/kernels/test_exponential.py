from __future__ import annotations

import pytest
import torch

from cortiq_fcd.kernels.exponential import exp_shifted_

SHAPES = [(1, 1), (3, 7), (2, 5, 131)]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul_(30).to(dtype)
    return x, x.amax(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_exp(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """An exponent's rounding is the shift's, shared by the row, and that of the result: ulps of both, relative."""
    x, shift = case(shape, dtype)
    want = (x.double() - shift.double()).exp()
    got = exp_shifted_(x.clone(), shift).double()
    ulp = torch.finfo(dtype).eps
    bound = ulp * (2 + shift.double().abs() + (x.double() - shift.double()).abs())
    assert ((got - want).abs() <= bound * want + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_masked_or_underflows_is_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -torch.inf, -2000.0], [5.0, 5.0, -torch.inf]], dtype=dtype)
    got = exp_shifted_(x, x.amax(-1, keepdim=True))
    assert got is x
    assert torch.equal(got != 0, torch.tensor([[True, False, False], [True, True, False]]))
    assert (got[got != 0] - 1).abs().max() <= 8 * torch.finfo(dtype).eps
