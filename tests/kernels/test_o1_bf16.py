"""The O(1) kernels with bf16 inputs: f32 inside, one rounding at the end."""

from __future__ import annotations

import pytest
import torch

from cortiq_fcd.kernels.o1_attention import Geometry, o1_attention_bwd, o1_attention_fwd
from tests.kernels.test_o1_attention import ROUNDING, clear_rows, dense, frozen_inverse, random_case
from tests.kernels.test_o1_stream import seal, served_rows
from tests.oracles.compare import Unchanged, assert_close, assert_within, autograd


@pytest.mark.parametrize("seed", range(3))
def test_teacher_forced(seed: int) -> None:
    """f32 inside: its noise, kappa * 2^-24, is far below a bf16 rounding."""
    geometry = Geometry(64, 20, 4, 16**-0.5)
    rounded = [x.bfloat16() for x in random_case(150, B=2, G=2, R=2, D=16, Dv=16, seed=seed)]
    unchanged = Unchanged(*rounded)
    q, k, v, dout = (x.double() for x in rounded)
    M = frozen_inverse(rounded[0], rounded[1], geometry, 8)
    joint = dense(q, k, v, M, geometry)
    clear = clear_rows(joint, 64) & (joint.kappa < 1e4)
    dout = dout * clear[..., None]
    _, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    out, saved = o1_attention_fwd(rounded[0], rounded[1], rounded[2], M, geometry)
    grads = o1_attention_bwd(dout.bfloat16(), saved)
    # Rows whose denominator nearly cancels are large, so each row is measured by its own size.
    allowed = 2.0**-8 * 1.01 * joint.out.abs() + 16 * ROUNDING * joint.kappa[..., None] * joint.out.abs().max()
    assert out.dtype == torch.bfloat16
    assert_within("out", out, joint.out, torch.where(clear[..., None], allowed, torch.inf))
    for name, got, want in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert_close(name, got, want, 2.0**-8 * 1.01 + ROUNDING * joint.kappa[clear].max().item())
    unchanged.check()


def test_served() -> None:
    geometry, m = Geometry(64, 20, 4, 16**-0.5), 8
    q, k, v, _ = (x.bfloat16() for x in random_case(150, B=2, G=2, R=2, D=16, Dv=16))
    joint = dense(q.double(), k.double(), v.double(), frozen_inverse(q, k, geometry, m), geometry)
    clear = (clear_rows(joint, 64) & (joint.kappa < 1e4))[..., 64:, None]
    served = served_rows(q, k, v, geometry, m)
    assert served.dtype == torch.bfloat16
    assert seal(q, k, v, geometry, m).T_hat.dtype == torch.float32
    allowed = 2.0**-8 * 1.01 * joint.out.abs() + 16 * ROUNDING * joint.kappa[..., None] * joint.out.abs().max()
    assert_within("served", served, joint.out[..., 64:, :], torch.where(clear, allowed[..., 64:, :], torch.inf))
