from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cortiq_fcd.kernels import swiglu as kernel
from cortiq_fcd.kernels.swiglu import swiglu_bwd, swiglu_fwd
from tests.oracles import swiglu as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_no_worse_than, autograd

SIZES = [(1, 1), (1, 7), (13, 1), (11, 17), (64, 48)]


def case(N: int, F: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate, up, dy = (torch.randn(N, F, generator=generator, dtype=torch.float64) for _ in range(3))
    return 3 * gate, up, dy


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_oracle_and_finite_differences(size: tuple[int, int], fused: bool) -> None:
    gate, up, dy = case(*size)
    if fused:
        gate, up = torch.cat((gate, up), 1).split(size[1], 1)
    unchanged = Unchanged(gate, up, dy)
    want, (dgate, dup) = autograd(oracle.swiglu, (gate, up), dy)
    y, saved = swiglu_fwd(gate, up)
    grads = swiglu_bwd(dy, saved)
    assert_close("y", y, want, 1e-13)
    assert_close("dgate", grads.dgate, dgate, 1e-13)
    assert_close("dup", grads.dup, dup, 1e-13)
    assert torch.equal(grads.dgate_up, torch.cat((grads.dgate, grads.dup), 1))
    unchanged.check()
    if gate.numel() < 1000:
        assert_differences("swiglu", lambda g, u: swiglu_fwd(g, u)[0], (gate, up), (grads.dgate, grads.dup), dy)


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 14])
def test_blocks_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, dy = case(13, 5)
    y, saved = swiglu_fwd(gate, up)
    want = swiglu_bwd(dy, saved).dgate_up
    monkeypatch.setattr(kernel, "BLOCK", rows * 5 + 4)
    assert_close("y", swiglu_fwd(gate, up)[0], y, 1e-15)
    assert_close("dgate_up", swiglu_bwd(dy, saved).dgate_up, want, 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e2])
def test_low_precision_is_no_worse_than_torch(dtype: torch.dtype, magnitude: float) -> None:
    gate, up, dy = (a.to(dtype) for a in case(61, 127))
    gate = gate * magnitude
    want, wanted = autograd(lambda g, u: functional.silu(g) * u, (gate.double(), up.double()), dy.double())
    rival, rivals = autograd(lambda g, u: functional.silu(g) * u, (gate, up), dy)
    y, saved = swiglu_fwd(gate, up)
    grads = swiglu_bwd(dy, saved)
    assert_no_worse_than("y", y, rival, want)
    assert_no_worse_than("dgate", grads.dgate, rivals[0], wanted[0])
    assert_no_worse_than("dup", grads.dup, rivals[1], wanted[1])


def test_huge_gates_stay_finite() -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    y, saved = swiglu_fwd(gate, torch.ones_like(gate))
    grads = swiglu_bwd(torch.ones_like(gate), saved)
    assert_close("y", y, gate.clamp_min(0), 1e-6)
    assert_close("dgate", grads.dgate, torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]]), 1e-6)


def test_bad_shapes_are_refused() -> None:
    gate, up, dy = case(5, 3)
    for bad_gate, bad_up in ((gate, up[:, :2]), (gate, up[:1]), (gate[0], up[0]), (gate[None], up[None])):
        with pytest.raises(ValueError, match="swiglu"):
            swiglu_fwd(bad_gate, bad_up)
    _, saved = swiglu_fwd(gate, up)
    for bad_dy in (dy[:1], dy[:, :1], dy[0], dy.T):
        with pytest.raises(ValueError, match="swiglu"):
            swiglu_bwd(bad_dy, saved)
