from __future__ import annotations

import pytest
import torch

from cortiq_fcd.kernels.unit_lower_inverse import BASE, unit_lower_inverse
from tests.oracles.compare import Unchanged, assert_close

SHAPES = [(1, 1), (2, 2), (3, 4, 4), (5, BASE, BASE), (2, 3, 2 * BASE, 2 * BASE), (2, 1, 3, 64, 64)]


def strictly_lower(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(shape[-1] ** -0.5).tril_(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_triangular_solve(shape: tuple[int, ...]) -> None:
    L = strictly_lower(*shape)
    unchanged = Unchanged(L)
    eye = torch.eye(shape[-1], dtype=L.dtype).expand(shape)
    want = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    got = unit_lower_inverse(L)
    assert_close("inverse", got, want, 1e-13)
    assert (got.triu(1) == 0).all()
    assert (got.diagonal(dim1=-2, dim2=-1) == 1).all()
    unchanged.check()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_f32_is_no_worse_than_the_triangular_solve(shape: tuple[int, ...]) -> None:
    L = strictly_lower(*shape, seed=1)
    eye = torch.eye(shape[-1], dtype=L.dtype).expand(shape)
    want = torch.linalg.solve_triangular(L.float().double(), eye, upper=False, unitriangular=True)
    rival = torch.linalg.solve_triangular(L.float(), eye.float(), upper=False, unitriangular=True)
    error = (rival.double() - want).abs().max().item()
    assert_close("inverse", unit_lower_inverse(L.float()), want, (2 * error + 4 * 2.0**-23) / want.abs().max().item())


def test_equal_keys() -> None:
    """L all ones, the delta rule's worst case: the inverse is a bidiagonal of +-1, powers of L reach 1e17."""
    L = torch.ones(64, 64).tril_(-1)
    assert torch.equal(unit_lower_inverse(L), torch.eye(64) - torch.eye(64).roll(1, 0).tril(-1))


def test_strided_input() -> None:
    L = strictly_lower(3, 32, 32)
    assert_close("strided", unit_lower_inverse(L.mT.contiguous().mT), unit_lower_inverse(L), 1e-14)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 3), (2, 6, 6), (0, 0), (4, 2)])
def test_bad_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="unit_lower_inverse"):
        unit_lower_inverse(torch.zeros(shape))
