from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.delta_rule import CHUNK, delta_rule_bwd, delta_rule_fwd, delta_rule_step
from tests.oracles import delta_net as oracle
from tests.oracles.compare import (
    Unchanged,
    assert_close,
    assert_differences,
    assert_rounded_once,
    assert_within,
    autograd,
)

# B, G, R, T, Dk, Dv
SMALL = [(1, 1, 1, 1, 1, 1), (2, 1, 3, 5, 2, 3), (1, 2, 1, 7, 3, 1), (2, 3, 2, 11, 4, 5)]
NAMES = ("dq", "dk", "dv", "dlog_g", "dbeta")


def case(B: int, G: int, R: int, T: int, Dk: int, Dv: int, *, decay: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, log_g, beta, dout; k of length 1, log_g down to a few times -decay."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, G, T, Dk), (B, G, T, Dk), (B, G, R, T, Dv), (B, G, R, T), (B, G, R, T), (B, G, R, T, Dv))
    q, k, v, log_g, beta, dout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    k = k / k.norm(dim=-1, keepdim=True)
    return q, k, v, -decay * log_g.abs(), torch.sigmoid(beta), dout


def check(inputs: tuple[Tensor, ...], bound: float = 1e-12) -> None:
    *args, dout = inputs
    unchanged = Unchanged(*inputs)
    want, wanted = autograd(lambda *x: oracle.delta_rule(*x)[0], args, dout)
    out, state, saved = delta_rule_fwd(*args)
    grads = delta_rule_bwd(dout, saved)
    assert_close("o", out, want, bound)
    assert_close("state", state, oracle.delta_rule(*args)[1], bound)
    # With one position dlog_g is exactly 0 (a zero state decays to zero): bound it by the largest gradient of all.
    largest = max(g.abs().max().item() for g in wanted)
    for name, expected in zip(NAMES, wanted, strict=True):
        got = getattr(grads, name)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= bound * largest, name
    unchanged.check()


@pytest.mark.parametrize("size", SMALL)
def test_oracle_small(size: tuple[int, ...]) -> None:
    check(case(*size))


@pytest.mark.parametrize("T", [2, 3, 4, 8, 9, 16, 17, *(n * CHUNK + off for n in (1, 2, 3) for off in (-1, 0, 1))])
@pytest.mark.parametrize("decay", [0.01, 1.0])
def test_oracle_around_the_chunk(T: int, decay: float) -> None:
    check(case(1, 2, 2, T, 3, 4, decay=decay))


@pytest.mark.parametrize("decay", [0.0, 1e-3, 28.0, 300.0])
def test_any_decay_over_several_chunks(decay: float) -> None:
    """g from exactly 1 through 1e-12 (log g = -28) to an underflow to 0 at every position."""
    check(case(1, 2, 2, 2 * CHUNK + 5, 3, 4, decay=decay))


def test_mixed_decay() -> None:
    """Strong decay now and then, none between: differences of its running sum must keep their digits."""
    *rest, log_g, beta, dout = case(1, 1, 2, 2 * CHUNK + 5, 3, 4, decay=1e-4)
    log_g[..., ::9] = -500.0
    check((*rest, log_g, beta, dout))


@pytest.mark.parametrize("size", [*SMALL[:3], (2, 2, 2, 4, 3, 2)])
def test_finite_differences(size: tuple[int, ...]) -> None:
    *args, dout = case(*size)
    grads = delta_rule_bwd(dout, delta_rule_fwd(*args)[2])
    assert_differences("delta_rule", lambda *x: delta_rule_fwd(*x)[0], args, [getattr(grads, n) for n in NAMES], dout)


def test_f32_against_f64() -> None:
    """torch has no such op. Stated bound: 64 ulp of the largest entry over several chunks of keys of length 1."""
    *args, dout = (x.float() for x in case(2, 2, 2, 3 * CHUNK + 7, 16, 16, decay=0.1))
    want, wanted = autograd(lambda *x: oracle.delta_rule(*x)[0], [x.double() for x in args], dout.double())
    out, _, saved = delta_rule_fwd(*args)
    grads = delta_rule_bwd(dout, saved)
    assert out.dtype == torch.float32
    assert_close("o", out, want, 64 * 2.0**-23)
    for name, expected in zip(NAMES, wanted, strict=True):
        assert_close(name, getattr(grads, name), expected, 64 * 2.0**-23)


def test_steps_continue_the_sequence() -> None:
    q, k, v, log_g, beta, _ = case(2, 3, 2, 23, 4, 5)
    want, last = oracle.delta_rule(q, k, v, log_g, beta)
    _, state, _ = delta_rule_fwd(q[:, :, :17], k[:, :, :17], v[..., :17, :], log_g[..., :17], beta[..., :17])
    for t in range(17, 23):
        before = state.clone()
        o, following = delta_rule_step(state, q[:, :, t], k[:, :, t], v[..., t, :], log_g[..., t], beta[..., t])
        assert torch.equal(state, before), "the step changed its argument"
        assert_close(f"o at {t}", o, want[..., t, :], 1e-13)
        state = following
    assert_close("state", state, last, 1e-13)


def test_bad_shapes_are_refused() -> None:
    q, k, v, log_g, beta, _ = case(2, 3, 2, 5, 4, 3)
    for bad in (
        (q[0], k, v, log_g, beta),
        (q, k[..., :3], v, log_g, beta),
        (q, k, v[:, :, 0], log_g, beta),
        (q, k, v[..., :4, :], log_g, beta),
        (q, k, v[:, :1], log_g, beta),
        (q, k, v, log_g[..., :4], beta),
        (q, k, v, log_g, beta[:, :, :1]),
        (q, k[:, :2], v, log_g, beta),
    ):
        with pytest.raises(ValueError, match="delta_rule"):
            delta_rule_fwd(*bad)
    _, state, saved = delta_rule_fwd(q, k, v, log_g, beta)
    for bad_dout in (v[:1], v[..., :2], v[0], v[..., :2, :], torch.cat((v, v), 3)):
        with pytest.raises(ValueError, match="delta_rule"):
            delta_rule_bwd(bad_dout, saved)
    step = q[:, :, 0], k[:, :, 0], v[..., 0, :], log_g[..., 0], beta[..., 0]
    for i, narrow in enumerate((state[..., :2], *(x[:, :2] for x in step))):
        args = [state, *step]
        args[i] = narrow
        with pytest.raises(ValueError, match="delta_rule"):
            delta_rule_step(*args)


@pytest.mark.parametrize("size", [*SMALL[1:], (2, 2, 2, 3 * CHUNK + 7, 16, 16)])
def test_bf16_is_rounded_once(size: tuple[int, ...]) -> None:
    inputs = [x.bfloat16() for x in case(*size, decay=0.1)]
    unchanged = Unchanged(*inputs)
    *args, dout = inputs
    want, wanted = autograd(lambda *x: oracle.delta_rule(*x)[0], [x.double() for x in args], dout.double())
    out, state, saved = delta_rule_fwd(*args)
    grads = delta_rule_bwd(dout, saved)
    assert state.dtype == torch.float32
    assert_rounded_once("o", out, want)
    for name, expected in zip(NAMES, wanted, strict=True):
        assert_rounded_once(name, getattr(grads, name), expected)
    q, k, v, log_g, beta = (x.double() for x in args)
    last = size[3] - 1
    before = oracle.delta_rule(q[:, :, :last], k[:, :, :last], v[..., :last, :], log_g[..., :last], beta[..., :last])[1]
    step = (args[0][:, :, last], args[1][:, :, last], args[2][..., last, :], args[3][..., last], args[4][..., last])
    o, following = delta_rule_step(before.float(), *step)
    assert following.dtype == torch.float32
    assert_rounded_once("step", o, want[..., last, :])
    unchanged.check()


def test_equal_keys_without_decay() -> None:
    """The system's worst case: L is all ones, and its powers reach 1e17. f32 stays at its rounding."""
    q, k, v, log_g, beta, dout = (x.float() for x in case(1, 2, 2, 2 * CHUNK, 8, 4, decay=0.0))
    k[:] = k[..., :1, :]
    beta[:] = 1
    want, wanted = autograd(
        lambda *x: oracle.delta_rule(*x)[0], [x.double() for x in (q, k, v, log_g, beta)], dout.double()
    )
    out, _, saved = delta_rule_fwd(q, k, v, log_g, beta)
    grads = delta_rule_bwd(dout, saved)
    assert_close("o", out, want, 64 * 2.0**-23)
    # Each key erases what the one before wrote: nothing of an old state is left to decay, and dlog_g is all but 0.
    largest = max(g.abs().max().item() for g in wanted)
    for name, expected in zip(NAMES, wanted, strict=True):
        assert_within(name, getattr(grads, name), expected, torch.tensor(64 * 2.0**-23 * largest))


@pytest.mark.parametrize("at", [0, 3, CHUNK])
def test_a_step_size_of_zero(at: int) -> None:
    """beta = 0 writes nothing, yet its gradient is not 0."""
    q, k, v, log_g, beta, dout = case(1, 2, 2, CHUNK + 5, 3, 4, decay=0.1)
    beta[..., at] = 0
    check((q, k, v, log_g, beta, dout))
