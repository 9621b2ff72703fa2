"""GatedDeltaNet as a whole, and its small parts: convolution and length normalisation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.causal_conv import causal_conv_bwd, causal_conv_fwd, causal_conv_step
from cortiq_fcd.kernels.delta_rule import CHUNK
from cortiq_fcd.kernels.gated_delta_net import (
    Parameters,
    Streams,
    gated_delta_net_bwd,
    gated_delta_net_fwd,
    gated_delta_net_step,
)
from cortiq_fcd.kernels.l2norm import l2norm_bwd, l2norm_fwd
from tests.oracles import delta_net as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_rounded_once, autograd

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "kernels"
NAMES = ("qkv", "z", "a", "b")


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize(("B", "T", "C", "K"), [(1, 1, 1, 1), (2, 1, 3, 4), (1, 3, 2, 4), (3, 4, 5, 4), (2, 11, 3, 5)])
def test_convolution(B: int, T: int, C: int, K: int) -> None:
    x, weight, dy = normal((B, T, C), (C, K), (B, T, C))
    unchanged = Unchanged(x, weight, dy)
    want, (dx,) = autograd(lambda x: oracle.causal_conv(x, weight), (x,), dy)
    y, saved = causal_conv_fwd(x, weight)
    assert_close("y", y, want, 1e-13)
    assert_close("dx", causal_conv_bwd(dy, saved), dx, 1e-13)
    assert_differences("conv", lambda x: causal_conv_fwd(x, weight)[0], (x,), (causal_conv_bwd(dy, saved),), dy)
    tail = torch.zeros(B, K - 1, C, dtype=x.dtype)
    for t in range(T):
        step, tail = causal_conv_step(x[:, t], tail, weight)
        assert_close(f"step {t}", step, want[:, t], 1e-13)
    unchanged.check()
    for bad_x, bad_weight in ((x[0], weight), (x, weight[0]), (x, torch.cat((weight, weight)))):
        with pytest.raises(ValueError, match="causal_conv"):
            causal_conv_fwd(bad_x, bad_weight)
    for bad_dy in (dy[0], dy[..., :0], torch.cat((dy, dy), 1)):
        with pytest.raises(ValueError, match="causal_conv"):
            causal_conv_bwd(bad_dy, saved)
    for bad_step, bad_tail in ((x[0, 0], tail), (x[:, 0], tail[0]), (x[:, 0], torch.cat((tail, x[:, :1]), 1))):
        with pytest.raises(ValueError, match="causal_conv"):
            causal_conv_step(bad_step, bad_tail, weight)


@pytest.mark.parametrize(("B", "T", "C", "K"), [(1, 1, 1, 1), (2, 11, 3, 5), (3, 3, 5, 4)])
def test_convolution_in_bf16_is_rounded_once(B: int, T: int, C: int, K: int) -> None:
    x, weight, dy = (a.bfloat16() for a in normal((B, T, C), (C, K), (B, T, C)))
    want, (dx,) = autograd(lambda x: oracle.causal_conv(x, weight.double()), (x.double(),), dy.double())
    y, saved = causal_conv_fwd(x, weight)
    assert_rounded_once("y", y, want)
    assert_rounded_once("dx", causal_conv_bwd(dy, saved), dx)
    padded = torch.cat((x.new_zeros(B, K - 1, C), x), 1)
    step, tail = causal_conv_step(x[:, -1], padded[:, T - 1 : -1], weight)
    assert tail.dtype == torch.bfloat16
    assert torch.equal(step, y[:, -1])


@pytest.mark.parametrize("shape", [(1,), (5, 1), (2, 3, 7)])
@pytest.mark.parametrize("length", [1.0, 0.25])
def test_length_normalisation(shape: tuple[int, ...], length: float) -> None:
    x, dy = normal(shape, shape)
    unchanged = Unchanged(x, dy)
    want, (dx,) = autograd(lambda x: oracle.l2norm(x, 1e-2, length), (x,), dy)
    y, saved = l2norm_fwd(x, 1e-2, length)
    assert_close("y", y, want, 1e-13)
    assert_close("dx", l2norm_bwd(dy, saved), dx, 1e-12)
    assert_differences("l2norm", lambda x: l2norm_fwd(x, 1e-2, length)[0], (x,), (l2norm_bwd(dy, saved),), dy)
    unchanged.check()
    x, dy = x.bfloat16(), dy.bfloat16()
    want, (dx,) = autograd(lambda x: oracle.l2norm(x, 1e-2, length), (x.double(),), dy.double())
    y, saved = l2norm_fwd(x, 1e-2, length)
    assert_rounded_once("y", y, want)
    assert_rounded_once("dx", l2norm_bwd(dy, saved), dx)


@pytest.mark.parametrize("shape", [(5, 1), (2, 3, 7)])
def test_f32_length_normalisation(shape: tuple[int, ...]) -> None:
    """Stated bound: 4 ulp of the largest entry."""
    x, dy = (a.float() for a in normal(shape, shape))
    want, (dx,) = autograd(lambda x: oracle.l2norm(x, 1e-2, 0.25), (x.double(),), dy.double())
    y, saved = l2norm_fwd(x, 1e-2, 0.25)
    assert_close("y", y, want, 4 * 2.0**-23)
    # In one dimension dx is what is left of a cancellation: measure it by dy / |x|.
    allowed = 4 * 2.0**-23 * max(dx.abs().max().item(), 0.25 * (dy.abs() / x.abs()).max().item())
    assert (l2norm_bwd(dy, saved) - dx).abs().max() <= allowed


def test_length_normalisation_refuses_another_shape() -> None:
    _, saved = l2norm_fwd(torch.ones(2, 3), 1e-6)
    for bad in (torch.ones(2, 2), torch.ones(3), torch.ones(1, 3)):
        with pytest.raises(ValueError, match="l2norm"):
            l2norm_bwd(bad, saved)


def case(
    B: int, T: int, G: int, R: int, Dk: int, Dv: int, K: int, *, strength: float = 1.0
) -> tuple[list[Tensor], Parameters, Tensor]:
    """Streams, frozen weights, dy. `strength` scales a: at 30 softplus reaches its linear branch."""
    channels = 2 * G * Dk + G * R * Dv
    qkv, z, a, b, dy, conv, A_log, dt_bias, norm = normal(
        (B, T, channels),
        (B, T, G * R * Dv),
        (B, T, G * R),
        (B, T, G * R),
        (B, T, G * R * Dv),
        (channels, K),
        (G * R,),
        (G * R,),
        (Dv,),
    )
    parameters = Parameters(conv, A_log, dt_bias, norm, 1e-6, G, Dk, Dv)
    return [qkv, z, strength * a, b], parameters, dy


def reference(p: Parameters, *streams: Tensor) -> Tensor:
    return oracle.gated_delta_net(
        *streams,
        conv=p.conv,
        A_log=p.A_log,
        dt_bias=p.dt_bias,
        norm=p.norm,
        eps=p.norm_eps,
        G=p.key_heads,
        R=p.shared,
        Dk=p.key_dim,
        Dv=p.value_dim,
    )


# B, T, G, R, Dk, Dv, K: T around the convolution's 4 taps and around the chunk
SIZES = [(1, 1, 1, 1, 2, 3, 4), (2, 5, 1, 2, 3, 2, 1), (1, 67, 2, 1, 3, 4, 4), (2, 130, 2, 2, 4, 3, 3)]
SIZES += [(1, T, 2, 2, 3, 5, 4) for T in (3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1)]


@pytest.mark.parametrize("strength", [1.0, 30.0])
@pytest.mark.parametrize("size", SIZES)
def test_oracle(size: tuple[int, ...], strength: float) -> None:
    streams, p, dy = case(*size, strength=strength)
    unchanged = Unchanged(*streams, dy, p.conv, p.A_log, p.dt_bias, p.norm)
    want, wanted = autograd(lambda *x: reference(p, *x), streams, dy)
    y, _, saved = gated_delta_net_fwd(Streams(*streams), p)
    grads = gated_delta_net_bwd(dy, saved)
    assert_close("y", y, want, 1e-11)
    largest = max(g.abs().max().item() for g in wanted)
    for name, expected in zip(NAMES, wanted, strict=True):
        assert (getattr(grads, name) - expected).abs().max() <= 1e-11 * largest, name
    unchanged.check()


def low_precision_case(dtype: torch.dtype, size: tuple[int, ...]) -> tuple[list[Tensor], Parameters, Tensor]:
    streams, p, dy = case(*size)
    weights = {key: getattr(p, key).to(dtype) for key in ("conv", "A_log", "dt_bias", "norm")}
    return [x.to(dtype) for x in streams], replace(p, **weights), dy.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [SIZES[1], SIZES[2], (2, 3 * CHUNK + 7, 2, 2, 16, 16, 4)])
def test_low_precision(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch has no such op. Stated bounds: f32 256 ulp of the largest entry, bf16 one rounding."""
    streams, p, dy = low_precision_case(dtype, size)
    unchanged = Unchanged(*streams, dy, p.conv, p.A_log, p.dt_bias, p.norm)
    exact = replace(p, **{key: getattr(p, key).double() for key in ("conv", "A_log", "dt_bias", "norm")})
    want, wanted = autograd(lambda *x: reference(exact, *x), [x.double() for x in streams], dy.double())
    y, state, saved = gated_delta_net_fwd(Streams(*streams), p)
    grads = gated_delta_net_bwd(dy, saved)
    results = (y, *(getattr(grads, name) for name in NAMES))
    for name, got, expected in zip(("y", *NAMES), results, (want, *wanted), strict=True):
        if dtype == torch.bfloat16:
            assert_rounded_once(name, got, expected)
        else:
            assert got.dtype == dtype
            assert_close(name, got, expected, 256 * 2.0**-23)
    assert state.S.dtype == torch.float32
    _, state, _ = gated_delta_net_fwd(Streams(*(x[:, :-1] for x in streams)), p)
    step = gated_delta_net_step(Streams(*(x[:, -1] for x in streams)), state, p)
    assert step.dtype == dtype
    assert_close("step", step, want[:, -1], 1.01 * max(torch.finfo(dtype).eps / 2, 256 * 2.0**-23))
    unchanged.check()


@pytest.mark.parametrize("size", [(2, 5, 1, 2, 3, 2, 1), (1, 6, 2, 1, 3, 4, 4)])
def test_finite_differences(size: tuple[int, ...]) -> None:
    streams, p, dy = case(*size)
    grads = gated_delta_net_bwd(dy, gated_delta_net_fwd(Streams(*streams), p)[2])
    forward = lambda *x: gated_delta_net_fwd(Streams(*x), p)[0]  # noqa: E731
    assert_differences("gated_delta_net", forward, streams, [getattr(grads, n) for n in NAMES], dy)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 65])
def test_steps_continue_the_sequence(prompt: int) -> None:
    """The state after a prompt shorter and longer than the convolution, and than a chunk."""
    streams, p, _ = case(2, prompt + 5, 2, 2, 4, 3, 4)
    want = reference(p, *streams)
    _, state, _ = gated_delta_net_fwd(Streams(*(x[:, :prompt] for x in streams)), p)
    for t in range(prompt, prompt + 5):
        y = gated_delta_net_step(Streams(*(x[:, t] for x in streams)), state, p)
        assert_close(f"y at {t}", y, want[:, t], 1e-11)


def test_bad_shapes_are_refused() -> None:
    streams, p, _ = case(2, 5, 1, 2, 3, 2, 4)
    qkv, z, a, b = streams
    for bad in ((qkv[..., :3], z, a, b), (qkv, z[..., :3], a, b), (qkv, z, a[..., :1], b)):
        with pytest.raises(ValueError, match="gated_delta_net"):
            gated_delta_net_fwd(Streams(*bad), p)
    _, state, saved = gated_delta_net_fwd(Streams(*streams), p)
    for bad_dy in (z[:1], z[:, :4], z[..., :3], z[0]):
        with pytest.raises(ValueError, match="gated_delta_net"):
            gated_delta_net_bwd(bad_dy, saved)
    with pytest.raises(ValueError, match="gated_delta_net"):
        gated_delta_net_step(Streams(qkv[:, 0], z[:, 0], a[:, 0], b[:, 0, :1]), state, p)


def golden(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"reference data {name} is not beside the repository")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_forward(dtype: torch.dtype) -> None:
    data: dict[str, Any] = json.loads(golden("gdn_golden.json").read_text(encoding="utf-8"))
    cfg, flat = data["cfg"], {key: torch.tensor(value, dtype=dtype) for key, value in data["weights"].items()}
    hidden, heads, Dv = cfg["hidden_size"], cfg["num_v_heads"], cfg["value_head_dim"]
    x = torch.tensor(data["x"], dtype=dtype)
    streams = Streams(*((x @ flat[f"in_proj_{name}"].view(-1, hidden).T)[None] for name in NAMES))
    p = Parameters(
        flat["conv1d"].view(-1, cfg["conv_kernel"]),
        flat["A_log"],
        flat["dt_bias"],
        flat["norm"],
        cfg["rms_eps"],
        cfg["num_k_heads"],
        cfg["key_head_dim"],
        Dv,
    )
    y = gated_delta_net_fwd(streams, p)[0][0] @ flat["out_proj"].view(hidden, heads * Dv).T
    want = torch.tensor(data["expect"], dtype=torch.float64)
    assert (y.double() - want).abs().max() < 1e-6


def test_golden_gradient() -> None:
    with np.load(golden("gdn_grad.npz")) as arrays:
        data = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    _, key_heads, Dk, Dv, _ = data["dims"].tolist()
    p = Parameters(
        data["conv1d"].squeeze(1), data["A_log"], data["dt_bias"], data["norm"], data["eps"].item(), key_heads, Dk, Dv
    )
    streams = Streams(*(data["x"] @ data[f"in_proj_{name}"].T for name in NAMES))
    y, _, saved = gated_delta_net_fwd(streams, p)
    assert_close("out", y @ data["out_proj"].T, data["out"], 1e-11)
    grads = gated_delta_net_bwd(data["dout"] @ data["out_proj"], saved)
    dx = sum((getattr(grads, name) @ data[f"in_proj_{name}"] for name in NAMES), torch.zeros_like(data["x"]))
    assert_close("dx", dx, data["dx"], 1e-11)
