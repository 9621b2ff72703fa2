from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cortiq_fcd.kernels.causal_attention import (
    BLOCK_ROWS,
    causal_attention_bwd,
    causal_attention_fwd,
    causal_attention_step,
)
from tests.oracles import attention as oracle
from tests.oracles.compare import (
    Unchanged,
    assert_close,
    assert_differences,
    assert_no_worse_than,
    assert_rounded_once,
    autograd,
)

SCALE = 0.3
# B, G, R, T, D, Dv
SMALL = [(1, 1, 1, 1, 1, 1), (2, 1, 3, 5, 2, 3), (1, 2, 1, 7, 3, 1), (2, 3, 2, 11, 4, 5)]


def case(B: int, G: int, R: int, T: int, D: int, Dv: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, G, R, T, D), (B, G, T, D), (B, G, T, Dv), (B, G, R, T, Dv))
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q, k, v, dout


def check_against_oracle(size: tuple[int, ...], window: int | None, softcap: float | None = None) -> None:
    q, k, v, dout = case(*size)
    unchanged = Unchanged(q, k, v, dout)
    want, wanted = autograd(lambda q, k, v: oracle.causal_attention(q, k, v, SCALE, window, softcap), (q, k, v), dout)
    out, saved = causal_attention_fwd(q, k, v, SCALE, window=window, softcap=softcap)
    grads = causal_attention_bwd(dout, saved)
    # With one key a row p = 1, and dq, dk are exactly 0: bound them by the largest gradient of all.
    largest = max(g.abs().max().item() for g in wanted)
    assert_close("out", out, want, 1e-13)
    for name, got, expected in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-13 * largest, name
    unchanged.check()


@pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("size", SMALL)
def test_oracle_small(size: tuple[int, ...], window: int | None) -> None:
    check_against_oracle(size, window)


@pytest.mark.parametrize("window", [None, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("T", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 1])
def test_oracle_around_the_block(T: int, window: int | None) -> None:
    check_against_oracle((1, 2, 2, T, 3, 2), window)


@pytest.mark.parametrize("T", [16, 17, 18])
def test_oracle_around_the_window(T: int) -> None:
    check_against_oracle((2, 1, 2, T, 3, 2), 17)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("size", [*SMALL, (1, 2, 2, BLOCK_ROWS + 1, 3, 2)])
def test_oracle_with_a_soft_cap(size: tuple[int, ...], softcap: float, window: int | None) -> None:
    check_against_oracle(size, window, softcap)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (4, None), (None, 0.7)])
@pytest.mark.parametrize("size", SMALL)
def test_finite_differences(size: tuple[int, ...], window: int | None, softcap: float | None) -> None:
    q, k, v, dout = case(*size)
    grads = causal_attention_bwd(dout, causal_attention_fwd(q, k, v, SCALE, window=window, softcap=softcap)[1])
    forward = lambda q, k, v: causal_attention_fwd(q, k, v, SCALE, window=window, softcap=softcap)[0]  # noqa: E731
    assert_differences("causal_attention", forward, (q, k, v), (grads.dq, grads.dk, grads.dv), dout)


@pytest.mark.parametrize("window", [None, 50])
def test_f32_is_no_worse_than_torch(window: int | None) -> None:
    q, k, v, dout = (a.float() for a in case(2, 2, 3, 301, 16, 16))
    t, j = torch.arange(301)[:, None], torch.arange(301)
    seen = (j <= t) & (t - j < (window or 301))

    def torch_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (2, 2, 3, 301, 16)
        k, v = (x[:, :, None].expand(heads).flatten(1, 2) for x in (k, v))
        out = functional.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=seen, scale=SCALE)
        return out.view(heads)

    want, wanted = autograd(torch_op, [x.double() for x in (q, k, v)], dout.double())
    rival, rivals = autograd(torch_op, (q, k, v), dout)
    out, saved = causal_attention_fwd(q, k, v, SCALE, window=window)
    grads = causal_attention_bwd(dout, saved)
    assert_no_worse_than("out", out, rival, want)
    for name, got, other, exact in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), rivals, wanted, strict=True):
        assert_no_worse_than(name, got, other, exact)


def test_strided_inputs() -> None:
    """The model hands over views whose T and head axes are swapped."""
    q, k, v, dout = case(2, 2, 3, 11, 4, 5)
    swapped = q.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    k_view, v_view = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    dout_view = dout.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    plain = causal_attention_bwd(dout, causal_attention_fwd(q, k, v, SCALE)[1])
    viewed = causal_attention_bwd(dout_view, causal_attention_fwd(swapped, k_view, v_view, SCALE)[1])
    for name in ("dq", "dk", "dv"):
        assert_close(name, getattr(viewed, name), getattr(plain, name), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    """Logits of +-1e4. f32 logits carry a rounding of 1e4 * 2^-24, so weights are off by about 1e-3 relative."""
    q, k, v, dout = (x.to(dtype) for x in case(1, 2, 2, 37, 4, 3))
    logits = oracle.default_scale(4) * q.double() @ k.double()[:, :, None].mT
    q = q * (1e4 / logits.abs().max().item()) ** 0.5
    k = k * (1e4 / logits.abs().max().item()) ** 0.5
    scale = oracle.default_scale(4)
    inputs = [x.double() for x in (q, k, v)]
    want, wanted = autograd(lambda q, k, v: oracle.causal_attention(q, k, v, scale), inputs, dout.double())
    out, saved = causal_attention_fwd(q, k, v, scale)
    grads = causal_attention_bwd(dout, saved)
    bound = 1e-10 if dtype == torch.float64 else 1e-2
    assert_close("out", out, want, bound)
    assert_close("dq", grads.dq, wanted[0], bound)
    assert_close("dk", grads.dk, wanted[1], bound)
    assert_close("dv", grads.dv, wanted[2], bound)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("size", SMALL)
def test_step_is_the_last_row(size: tuple[int, ...], softcap: float | None) -> None:
    q, k, v, _ = case(*size)
    unchanged = Unchanged(q, k, v)
    for T in range(1, size[3] + 1):
        want = oracle.causal_attention(q[..., :T, :], k[:, :, :T], v[:, :, :T], SCALE, softcap=softcap)[..., -1, :]
        got = causal_attention_step(q[..., T - 1, :], k[:, :, :T], v[:, :, :T], SCALE, softcap=softcap)
        assert_close("step", got, want, 1e-13)
    unchanged.check()


def test_step_f32_is_no_worse_than_torch() -> None:
    q, k, v, _ = (a.float() for a in case(2, 2, 3, 301, 16, 16))
    step = q[..., -1, :]

    def torch_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, scale=SCALE)

    rival, want = torch_op(step, k, v), torch_op(step.double(), k.double(), v.double())
    assert_no_worse_than("step", causal_attention_step(step, k, v, SCALE), rival, want)


def test_bad_shapes_are_refused() -> None:
    q, k, v, dout = case(2, 3, 2, 5, 4, 3)
    for bad_q, bad_k, bad_v in (
        (q[0], k, v),
        (q, k[0], v),
        (q, k, v[0]),
        (q[..., :3], k, v),
        (q[:, :1], k, v),
        (q, k[:, :, :4], v),
        (q, k, v[:, :, :4]),
        (q[:1], k, v),
        (q, k, v[:, :1]),
    ):
        with pytest.raises(ValueError, match="causal_attention"):
            causal_attention_fwd(bad_q, bad_k, bad_v, SCALE)
    for window in (0, -1):
        with pytest.raises(ValueError, match="window"):
            causal_attention_fwd(q, k, v, SCALE, window=window)
    _, saved = causal_attention_fwd(q, k, v, SCALE)
    for bad_dout in (dout[:1], dout[..., :1, :], dout[..., :2], dout[0]):
        with pytest.raises(ValueError, match="causal_attention"):
            causal_attention_bwd(bad_dout, saved)
    step = q[..., 0, :]
    for bad_q, bad_k, bad_v in ((step[0], k, v), (step[:, :1], k, v), (step[..., :3], k, v), (step, k, v[:, :, :4])):
        with pytest.raises(ValueError, match="causal_attention"):
            causal_attention_step(bad_q, bad_k, bad_v, SCALE)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("size", [*SMALL[2:], (2, 2, 3, 2 * BLOCK_ROWS + 1, 16, 8)])
def test_bf16_is_rounded_once(size: tuple[int, ...], window: int | None, softcap: float | None) -> None:
    q, k, v, dout = (x.bfloat16() for x in case(*size))
    unchanged = Unchanged(q, k, v, dout)
    inputs = [x.double() for x in (q, k, v)]
    forward = lambda q, k, v: oracle.causal_attention(q, k, v, SCALE, window, softcap)  # noqa: E731
    want, wanted = autograd(forward, inputs, dout.double())
    out, saved = causal_attention_fwd(q, k, v, SCALE, window=window, softcap=softcap)
    grads = causal_attention_bwd(dout, saved)
    assert_rounded_once("out", out, want)
    for name, got, expected in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert_rounded_once(name, got, expected)
    if window is None:
        step = causal_attention_step(q[..., -1, :], k, v, SCALE, softcap=softcap)
        assert_rounded_once("step", step, want[..., -1, :])
    unchanged.check()
