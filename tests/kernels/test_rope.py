from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.rope import rope_bwd, rope_fwd, rotation
from tests.oracles import rope as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_within, autograd

# leading axes, T, D, rotary_dim
SIZES = [((), 1, 2, 2), ((1,), 5, 2, 2), ((3,), 1, 7, 4), ((2, 3), 7, 8, 8), ((2, 1, 3), 11, 13, 6)]
THETA = 10000.0


def frequencies(rotary_dim: int, theta: float = THETA) -> list[float]:
    return [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def case(lead: tuple[int, ...], T: int, D: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(*lead, T, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, dy


@pytest.mark.parametrize(("lead", "T", "D", "rotary_dim"), SIZES)
def test_oracle_and_finite_differences(lead: tuple[int, ...], T: int, D: int, rotary_dim: int) -> None:
    x, dy = case(lead, T, D)
    unchanged = Unchanged(x, dy)
    want, (dx,) = autograd(lambda x: oracle.rope(x, rotary_dim, THETA), (x,), dy)
    angles = rotation(T, frequencies(rotary_dim), like=x)
    assert_close("y", rope_fwd(x, angles), want, 1e-13)
    assert_close("dx", rope_bwd(dy, angles), dx, 1e-13)
    assert_differences("rope", lambda x: rope_fwd(x, angles), (x,), (rope_bwd(dy, angles),), dy)
    unchanged.check()


def test_backward_undoes_forward() -> None:
    x, _ = case((2, 3), 29, 8)
    angles = rotation(29, frequencies(6), like=x)
    assert_close("x", rope_bwd(rope_fwd(x, angles), angles), x, 1e-14)


def test_own_frequencies_and_magnitude() -> None:
    """Any frequency a pair (scaled ones, zero, negative), and a magnitude that scales the rotated dimensions only."""
    x, dy = case((2, 3), 7, 9)
    angles = rotation(7, [1.0, 0.0, -0.3, 1e-3], 1.25, like=x)

    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(7, dtype=torch.float64)[:, None] * torch.tensor(
            [1.0, 0.0, -0.3, 1e-3], dtype=torch.float64
        )
        pairs = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.full_like(angle, 1.25), angle)
        return torch.cat((pairs.real, pairs.imag, x[..., 8:]), -1)

    want, (dx,) = autograd(turned, (x,), dy)
    assert_close("y", rope_fwd(x, angles), want, 1e-13)
    assert_close("dx", rope_bwd(dy, angles), dx, 1e-13)


def test_strided_input_out_and_rows() -> None:
    x, _ = case((2, 7), 3, 8)
    strided = x.transpose(1, 2)  # [2, T=3, 7, 8] seen as [.., 7, 8]
    angles = rotation(7, frequencies(8), like=x)
    want = oracle.rope(strided.contiguous(), 8, THETA)
    got = rope_fwd(strided, angles)
    assert got.is_contiguous()
    assert_close("strided", got, want, 1e-13)
    out = torch.full((2, 3, 7, 8), 5.0, dtype=x.dtype)
    assert rope_fwd(strided, angles, out=out) is out
    assert torch.equal(out, got)
    later = rotation(20, frequencies(8), like=x).rows(13, 20)
    assert_close("rows", rope_fwd(strided, later), oracle.rope(strided, 8, THETA, first_position=13), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    """torch has no RoPE. Bound: angles are exact to one rounding, so y = a c - b s is off by at most 5 roundings of its
    two products (c and s, two products, one sum), whatever the position."""
    x = case((3,), 4096, 8)[0].to(dtype)
    angles = rotation(4096, frequencies(8, 1e6), like=x)
    want = oracle.rope(x.double(), 8, 1e6)
    size = oracle.rope(torch.zeros(1, 1, 8, dtype=torch.float64), 8, 1e6).abs() + (
        x.double()[..., :4].abs() + x.double()[..., 4:].abs()
    ).repeat(1, 1, 2)
    half_ulp = torch.finfo(dtype).eps / 2
    assert_within("y", rope_fwd(x, angles), want, 3 * half_ulp * size)
    assert_within("dx", rope_bwd(x, angles), oracle_backward(x), 3 * half_ulp * size)


def oracle_backward(dy: Tensor) -> Tensor:
    return autograd(lambda x: oracle.rope(x, 8, 1e6), (torch.zeros_like(dy, dtype=torch.float64),), dy.double())[1][0]


def test_bad_shapes_are_refused() -> None:
    x, _ = case((2,), 5, 8)
    for bad in (
        rotation(4, frequencies(8), like=x),
        rotation(6, frequencies(8), like=x),
        rotation(5, frequencies(10), like=x),
    ):
        with pytest.raises(ValueError, match="rope"):
            rope_fwd(x, bad)
        with pytest.raises(ValueError, match="rope"):
            rope_bwd(x, bad)
    with pytest.raises(ValueError, match="rope"):
        rope_fwd(x[0, 0], rotation(8, frequencies(8), like=x))
