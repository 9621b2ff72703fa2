"""Products in bf16: f32 in and out, factors rounded, sums in f32; nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels import products
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd

needs_bf16 = pytest.mark.skipif(not products.cpu_has_bf16(), reason="this CPU or torch has no bf16 products")
SIZES = [(8, 1, 1), (17, 5, 3), (64, 96, 128), (257, 131, 67)]


def factors(N: int, K: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N)
    return tuple(torch.randn(shape, generator=generator) for shape in ((N, K), (K, M), (M,)))  # type: ignore[return-value]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@needs_bf16
@pytest.mark.parametrize("size", SIZES)
def test_no_worse_than_rounded_factors(size: tuple[int, int, int]) -> None:
    a, b, bias = factors(*size)
    products.set_precision("bf16")
    # Half an ulp of bf16 for each factor, and f32's sum.
    bound = (2.1 * 2**-9 + 2e-7 * size[1]) * (a.double().abs() @ b.double().abs()) + 1e-6
    exact = a.double() @ b.double()
    assert ((products.mm(a, b).double() - exact).abs() <= bound).all()
    assert ((products.addmm(bias, a, b).double() - (exact + bias)).abs() <= bound).all()
    out = torch.empty(size[0], size[2])
    assert products.mm(a, b, out=out) is out
    assert torch.equal(out, products.mm(a, b))


@needs_bf16
@pytest.mark.parametrize("size", SIZES[2:])
def test_factors_are_rounded_and_sums_are_not(size: tuple[int, int, int]) -> None:
    a, b, _ = factors(*size)
    products.set_precision("bf16")
    # Far below the 2^-8 of a sum, or of a result, in bf16.
    bound = 2e-7 * size[1] * (rounded(a).abs() @ rounded(b).abs()).max()
    assert (products.mm(a, b).double() - rounded(a) @ rounded(b)).abs().max() <= bound


@needs_bf16
def test_all_three_products_of_a_linear_are_rounded() -> None:
    x, weight = factors(64, 96, 128)[:2]
    weight, dy = weight.T.contiguous(), torch.randn(64, 128)
    exact = linear_fwd(x, weight), linear_bwd_input(dy, weight), linear_bwd_weight(dy, x)
    products.set_precision("bf16")
    for name, a, b in zip(
        ("y", "dx", "dW"),
        (linear_fwd(x, weight), linear_bwd_input(dy, weight), linear_bwd_weight(dy, x)),
        exact,
        strict=True,
    ):
        error = (a - b).norm() / b.norm()
        assert 1e-4 < error < 2**-8, f"{name}: {error}"


@needs_bf16
def test_the_choice_reaches_nothing_else() -> None:
    products.set_precision("bf16")
    before = torch.backends.mkldnn.matmul.fp32_precision
    a, b, _ = factors(64, 96, 128)
    products.mm(a, b)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert torch.equal(torch.bmm(a[None], b[None])[0], torch.mm(a, b))
    # f64 oracles and the few rows of a decoding step stay as they are.
    assert torch.equal(products.mm(a.double(), b.double()), a.double() @ b.double())
    few = a[: products.FEW_ROWS - 1]
    assert torch.equal(products.mm(few, b), torch.mm(few, b))


@needs_bf16
def test_a_failed_product_leaves_the_switch_as_it_was() -> None:
    products.set_precision("bf16")
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError):
        products.mm(torch.zeros(9, 3), torch.zeros(4, 9))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_machine_without_bf16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="bf16 products need"):
        products.set_precision("bf16")
    assert products.get_precision() == "f32"
