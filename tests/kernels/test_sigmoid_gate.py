from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.sigmoid_gate import sigmoid_gate_bwd, sigmoid_gate_fwd
from tests.oracles import sigmoid_gate as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_no_worse_than, autograd

# leading axes, D, gate width
SIZES = [((), 1, 1), ((1,), 5, 5), ((7,), 3, 1), ((2, 3), 5, 5), ((2, 3, 2), 7, 1)]


def case(lead: tuple[int, ...], D: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*lead, D), (*lead, width), (*lead, D))
    x, g, dy = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, 3 * g, dy


@pytest.mark.parametrize(("lead", "D", "width"), SIZES)
def test_oracle_and_finite_differences(lead: tuple[int, ...], D: int, width: int) -> None:
    x, g, dy = case(lead, D, width)
    unchanged = Unchanged(x, g, dy)
    want, (dx, dg) = autograd(oracle.sigmoid_gate, (x, g), dy)
    y, saved = sigmoid_gate_fwd(x, g)
    grads = sigmoid_gate_bwd(dy, saved)
    assert_close("y", y, want, 1e-13)
    assert_close("dx", grads.dx, dx, 1e-13)
    assert_close("dg", grads.dg, dg, 1e-13)
    assert_differences("sigmoid_gate", lambda x, g: sigmoid_gate_fwd(x, g)[0], (x, g), (grads.dx, grads.dg), dy)
    unchanged.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 17])
def test_low_precision_is_no_worse_than_torch(width: int, dtype: torch.dtype) -> None:
    x, g, dy = (a.to(dtype) for a in case((61,), 17, width))
    want, wanted = autograd(lambda x, g: x * torch.sigmoid(g), (x.double(), g.double()), dy.double())
    rival, rivals = autograd(lambda x, g: x * torch.sigmoid(g), (x, g), dy)
    y, saved = sigmoid_gate_fwd(x, g)
    grads = sigmoid_gate_bwd(dy, saved)
    assert_no_worse_than("y", y, rival, want)
    assert_no_worse_than("dx", grads.dx, rivals[0], wanted[0])
    assert_no_worse_than("dg", grads.dg, rivals[1], wanted[1])


def test_bad_shapes_are_refused() -> None:
    x, g, _ = case((4,), 3, 3)
    for bad_x, bad_g in ((x, g[:3]), (x, g[:, :2]), (x[:1], g), (x, g[0])):
        with pytest.raises(ValueError, match="sigmoid_gate"):
            sigmoid_gate_fwd(bad_x, bad_g)
