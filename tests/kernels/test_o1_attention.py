"""The teacher-forced O(1) kernel (and with it o1_far_field) against its definition as T x T matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from cortiq_fcd.kernels.o1_attention import Geometry, landmarks, o1_attention_bwd, o1_attention_fwd
from tests.oracles import attention as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_differences, assert_within, autograd

F64_BOUND = 1e-10
# One rounding in f32. A row's cancelling denominator multiplies it by kappa; a bound is a count of roundings.
ROUNDING = 2.0**-24


def random_case(
    T: int, *, B: int = 1, G: int = 1, R: int = 1, D: int = 4, Dv: int = 3, size: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout. Entries of q and k are `size` times normal: at 1 a fifth of the far weights is negative."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, G, R, T, D), (B, G, T, D), (B, G, T, Dv), (B, G, R, T, Dv))
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return size * q, size * k, v, dout


def frozen_inverse(q: Tensor, k: Tensor, geometry: Geometry, m: int) -> Tensor:
    Qt, Kt = landmarks(q, k, geometry.seal, m)
    return landmark_inverse(Qt, Kt[:, :, None], geometry.scale)


def dense(q: Tensor, k: Tensor, v: Tensor, M: Tensor, geometry: Geometry, clamp_each_key: bool = False) -> oracle.Joint:
    return oracle.o1_attention(
        q,
        k,
        v,
        M,
        seal=geometry.seal,
        window=geometry.window,
        sink=geometry.sink,
        scale=geometry.scale,
        clamp_each_key=clamp_each_key,
    )


def check_against_dense(
    inputs: tuple[Tensor, ...], geometry: Geometry, m: int, bound: float = F64_BOUND
) -> oracle.Joint:
    q, k, v, dout = inputs
    M = frozen_inverse(q, k, geometry, m)
    unchanged = Unchanged(q, k, v, dout, M)
    want, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    out, saved = o1_attention_fwd(q, k, v, M, geometry)
    grads = o1_attention_bwd(dout, saved)
    assert_close("out", out, want, bound)
    for name, got, expected in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert_close(name, got, expected, bound)
    again = o1_attention_bwd(dout, saved)
    assert torch.equal(again.dq, grads.dq), "the backward changed what was saved"
    unchanged.check()
    return dense(q, k, v, M, geometry)


# seal, window, sink, m: chunks of 16 rows up to a window of 33, then window // 2, at most 128.
GEOMETRIES = [(20, 5, 2, 4), (13, 1, 0, 4), (13, 2, 1, 4), (37, 7, 0, 4), (70, 40, 3, 8), (64, 33, 4, 5)]


@pytest.mark.parametrize(("seal", "window", "sink", "m"), GEOMETRIES)
def test_every_tail_length(seal: int, window: int, sink: int, m: int) -> None:
    """One row after the seal, chunk - 1, chunk, chunk + 1, window +- 1, and more than two chunks."""
    geometry = Geometry(seal, window, sink, 0.5)
    c = geometry.chunk
    for tail in sorted({1, 2, c - 1, c, c + 1, max(window - 1, 1), window, window + 1, 2 * c + 3}):
        check_against_dense(random_case(seal + tail, seed=tail), geometry, m)


@pytest.mark.parametrize("seal", [9, 10, 11, 16, 17, 18, 19])
def test_seal_around_its_smallest_values(seal: int) -> None:
    """window + sink = 9 is the least that leaves a far key; window + sink + 8 = 17 the last prompt that stays exact."""
    check_against_dense(random_case(seal + 21), Geometry(seal, 7, 2, 0.5), 4)


@pytest.mark.parametrize(("B", "G", "R", "D", "Dv", "m"), [(2, 3, 2, 5, 3, 4), (1, 1, 3, 1, 1, 1), (3, 1, 1, 2, 7, 13)])
def test_every_axis(B: int, G: int, R: int, D: int, Dv: int, m: int) -> None:
    check_against_dense(random_case(61, B=B, G=G, R=R, D=D, Dv=Dv), Geometry(29, 6, 3, 0.4), m)


def test_whole_window_is_the_prompt_but_one_row() -> None:
    check_against_dense(random_case(24, G=2, R=2), Geometry(23, 4, 1, 0.5), 4)


def test_chunk_of_128_rows() -> None:
    geometry = Geometry(280, 257, 4, 0.5)
    assert geometry.chunk == 128
    for tail in (127, 129, 300):
        check_against_dense(random_case(280 + tail, R=2, seed=tail), geometry, 8)


def guard_case() -> tuple[tuple[Tensor, ...], Geometry, int]:
    return random_case(96, B=2, G=2, R=2, D=8, Dv=5, seed=222), Geometry(40, 9, 2, 8**-0.5), 5


def test_guard_drops_some_rows_and_keeps_negative_mass_in_others() -> None:
    inputs, geometry, m = guard_case()
    joint = check_against_dense(inputs, geometry, m)
    tail = slice(geometry.seal, None)
    dropped = ~joint.kept[..., tail]
    negative = (joint.weights[..., tail, :] < 0).any(-1) & joint.kept[..., tail]
    assert int(dropped.sum()) >= 10
    assert int(negative.sum()) >= 10
    # No decision of this case hangs on rounding: f32 and f64 decide alike.
    assert ((joint.far_sum.abs() / joint.far_abs)[..., tail]).min() > 1e-6


def test_a_clamp_of_each_key_would_have_failed() -> None:
    inputs, geometry, m = guard_case()
    q, k, v, dout = inputs
    M = frozen_inverse(q, k, geometry, m)
    out, saved = o1_attention_fwd(q, k, v, M, geometry)
    clamped, wrong = autograd(lambda q, k, v: dense(q, k, v, M, geometry, clamp_each_key=True).out, (q, k, v), dout)
    for name, got, other in (("out", out, clamped), ("dq", o1_attention_bwd(dout, saved).dq, wrong[0])):
        with pytest.raises(AssertionError, match="entries are off"):
            assert_close(name, got, other, 1e-2)


def test_dropped_row_gets_no_far_gradient() -> None:
    """dout on one dropped row alone: keys that only its far field could reach, and the landmarks, get nothing."""
    inputs, geometry, m = guard_case()
    q, k, v, dout = inputs
    M = frozen_inverse(q, k, geometry, m)
    joint = dense(q, k, v, M, geometry)
    b, g, r, t = next(at for at in (~joint.kept).nonzero().tolist() if at[3] > geometry.seal + geometry.window)
    only = torch.zeros_like(dout)
    only[b, g, r, t] = dout[b, g, r, t]
    grads = o1_attention_bwd(only, o1_attention_fwd(q, k, v, M, geometry)[1])
    first_near = t - geometry.window + 1
    assert (grads.dk[:, :, geometry.sink : first_near] == 0).all()
    assert (grads.dv[:, :, geometry.sink : first_near] == 0).all()
    assert (grads.dq[..., :t, :] == 0).all()
    assert (grads.dk[b, g, first_near : t + 1] != 0).any()


@pytest.mark.parametrize(
    ("shape", "geometry", "m"),
    [
        ({"T": 33, "size": 1.4, "seed": 77}, Geometry(14, 3, 1, 0.5), 4),
        ({"T": 23, "R": 2, "D": 1, "Dv": 2, "size": 1.4, "seed": 299}, Geometry(11, 1, 0, 0.7), 3),
        ({"T": 27, "B": 2, "G": 2, "R": 2, "D": 2, "Dv": 1, "seed": 269}, Geometry(12, 2, 3, 0.5), 4),
    ],
)
def test_finite_differences(shape: dict[str, Any], geometry: Geometry, m: int) -> None:
    """M is computed once and stays as q and k move. Seeds were searched for rows that are far from the guard's jump on
    both sides, where the kernel is smooth."""
    q, k, v, dout = random_case(**shape)
    M = frozen_inverse(q, k, geometry, m)
    joint = dense(q, k, v, M, geometry)
    tail = slice(geometry.seal, None)
    assert (joint.far_sum.abs() / joint.weights.abs().sum(-1))[..., tail].min() > 0.2, "not a smooth point"
    assert joint.kept[..., tail].any()
    assert not joint.kept[..., tail].all()
    grads = o1_attention_bwd(dout, o1_attention_fwd(q, k, v, M, geometry)[1])
    forward = lambda q, k, v: o1_attention_fwd(q, k, v, M, geometry)[0]  # noqa: E731
    assert_differences("o1_attention", forward, (q, k, v), (grads.dq, grads.dk, grads.dv), dout)


def clear_rows(joint: oracle.Joint, seal: int) -> Tensor:
    """Rows whose guard does not hang on rounding (polish.md section 3)."""
    clear = joint.far_sum.abs() >= 1e-6 * joint.far_abs
    clear[..., :seal] = True
    return clear


@pytest.mark.parametrize("seed", range(4))
def test_f32_against_f64(seed: int) -> None:
    """torch has no such op. Stated bound of a row: 16 roundings times its kappa. Of gradients: one rounding of
    the largest entry times the largest kappa, since every row reaches dk and dv."""
    geometry = Geometry(64, 20, 4, 16**-0.5)
    rounded = [x.float() for x in random_case(150, B=2, G=2, R=2, D=16, Dv=16, seed=seed)]
    q, k, v, dout = (x.double() for x in rounded)
    M = frozen_inverse(q, k, geometry, 8)
    joint = dense(q, k, v, M, geometry)
    # A row near the guard's jump may fall on either side: take its gradient out.
    dout = dout * clear_rows(joint, 64)[..., None]
    _, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    out, saved = o1_attention_fwd(rounded[0], rounded[1], rounded[2], M, geometry)
    assert out.dtype == torch.float32
    allowed = 16 * ROUNDING * joint.kappa * torch.maximum(v.abs().max(), joint.out.abs().amax(-1))
    allowed = torch.where(clear_rows(joint, 64), allowed, torch.inf)
    assert_within("out", out, joint.out, allowed[..., None])
    grads = o1_attention_bwd(dout.float(), saved)
    for name, got, want in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert got.dtype == torch.float32
        assert_close(name, got, want, ROUNDING * joint.kappa.max().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_logits_of_200(seed: int, dtype: torch.dtype) -> None:
    """Everything stays finite and right when logits reach +-200 and landmark logits with them.

    An f32 logit of 200 carries a rounding of 200 * 2^-24 by itself, and the far weight three of them, hence the bound.
    """
    T, geometry, m = 60, Geometry(25, 6, 2, 1.0), 4
    q, k, v, dout = random_case(T, R=2, D=3, seed=seed)
    # Rows of the prompt in m groups with a common direction, so that landmark logits are as large as any.
    for i in range(m):
        q[..., i * 25 // m : (i + 1) * 25 // m, :] = q[..., i * 25 // m, None, :]
        k[..., i * 25 // m : (i + 1) * 25 // m, :] = k[..., i * 25 // m, None, :]
    top = (q @ k[:, :, None].mT).abs().max().item()
    q, k = ((x * (200 / top) ** 0.5).to(dtype).double() for x in (q, k))
    v, dout = v.to(dtype).double(), dout.to(dtype).double()
    M = frozen_inverse(q, k, geometry, m)
    joint = dense(q, k, v, M, geometry)
    assert joint.out.isfinite().all()
    clear = clear_rows(joint, 25) & (joint.kappa < 1e3)
    assert clear.float().mean() > 0.7
    dout = dout * clear[..., None]
    _, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    out, saved = o1_attention_fwd(q.to(dtype), k.to(dtype), v.to(dtype), M, geometry)
    grads = o1_attention_bwd(dout.to(dtype), saved)
    for x in (out, grads.dq, grads.dk, grads.dv):
        assert x.isfinite().all()
    rounding = torch.finfo(dtype).eps / 2
    allowed = 4 * 200 * rounding * joint.kappa * torch.maximum(v.abs().max(), joint.out.abs().amax(-1))
    assert_within("out", out, joint.out, torch.where(clear, allowed, torch.inf)[..., None])
    bound = 4 * 200 * rounding * joint.kappa[clear].max().item()
    for name, got, want in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert_close(name, got, want, bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("late", [30, 35, 41, 42, 43, 44, 45, 60])
def test_a_late_key_with_large_logits_leaves_earlier_rows_alone(late: int, dtype: torch.dtype) -> None:
    """Key `late` has landmark logits 200 above the others, yet no query after the seal cares for it. Rows that see it
    as near, or not at all, must keep the far field of the small keys, wherever in its chunk the key lies."""
    geometry = Geometry(36, 8, 2, 8**-0.5)
    assert geometry.chunk == 16
    q, k, v, dout = random_case(80, R=2, D=8, seed=1)
    q[..., 0], k[..., 0] = 0, 0
    q[..., :36, 0] = 30
    k[..., late, 0] = 20
    q, k, v, dout = (x.to(dtype).double() for x in (q, k, v, dout))
    # M from landmarks without that key's direction: with it, M would make up for the key's size.
    plain_k = k.clone()
    plain_k[..., 0] = 0
    M = frozen_inverse(q, plain_k, geometry, 4)
    joint = dense(q, k, v, M, geometry)
    clear = clear_rows(joint, 36) & (joint.kappa < 1e4)
    before = slice(36, max(36, late + geometry.window))
    far_matters = (joint.far_abs * (joint.kept & clear))[..., before]
    assert late < 36 or (far_matters > 1e-3).any()
    dout = dout * clear[..., None]
    _, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    out, saved = o1_attention_fwd(q.to(dtype), k.to(dtype), v.to(dtype), M, geometry)
    grads = o1_attention_bwd(dout.to(dtype), saved)
    rounding = torch.finfo(dtype).eps / 2
    allowed = 200 * rounding * joint.kappa * torch.maximum(v.abs().max(), joint.out.abs().amax(-1))
    assert_within("out", out, joint.out, torch.where(clear, allowed, torch.inf)[..., None])
    bound = 200 * rounding * joint.kappa[clear].max().item()
    for name, got, want in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
        assert_close(name, got, want, bound)


def test_rows_without_a_far_weight() -> None:
    """M = 0 leaves the far field exactly empty, whatever the size of the near logits (all near -200 here)."""
    geometry = Geometry(20, 4, 1, 1.0)
    q, k, v, dout = random_case(45, D=2)
    q = torch.cat((q, torch.full_like(q[..., :1], 14.0)), -1)
    k = torch.cat((k, torch.full_like(k[..., :1], -14.0)), -1)
    M = torch.zeros(1, 1, 1, 4, 4, dtype=torch.float64)
    want, wanted = autograd(lambda q, k, v: dense(q, k, v, M, geometry).out, (q, k, v), dout)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-4)):
        out, saved = o1_attention_fwd(q.to(dtype), k.to(dtype), v.to(dtype), M, geometry)
        grads = o1_attention_bwd(dout.to(dtype), saved)
        assert_close("out", out, want, bound)
        for name, got, expected in zip(("dq", "dk", "dv"), (grads.dq, grads.dk, grads.dv), wanted, strict=True):
            assert_close(name, got, expected, bound)


def test_strided_inputs() -> None:
    """The model hands over views whose T and head axes are swapped."""
    inputs, geometry, m = guard_case()
    q, k, v, dout = inputs
    M = frozen_inverse(q, k, geometry, m)
    plain = o1_attention_bwd(dout, o1_attention_fwd(q, k, v, M, geometry)[1])
    q, dout = (x.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4) for x in (q, dout))
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    viewed = o1_attention_bwd(dout, o1_attention_fwd(q, k, v, M, geometry)[1])
    for name in ("dq", "dk", "dv"):
        assert_close(name, getattr(viewed, name), getattr(plain, name), 1e-12)


def test_bad_arguments_are_refused() -> None:
    q, k, v, dout = random_case(40, B=2, G=3, R=2)
    geometry = Geometry(20, 5, 2, 0.5)
    M = frozen_inverse(q, k, geometry, 4)
    for bad in (
        (q[0], k, v, M),
        (q, k[0], v, M),
        (q, k, v[0], M),
        (q, k, v, M[0]),
        (q[..., :3], k, v, M),
        (q, k[:, :, :39], v, M),
        (q, k, v[:, :, :39], M),
        (q, k, v[:, :1], M),
        (q, k, v, M[:1]),
        (q, k, v, M[:, :, :1]),
        (q, k, v, M[..., :3]),
        (q, k, v, M.float()),
        (q[:, :1], k, v, M),
    ):
        with pytest.raises(ValueError, match="o1_attention"):
            o1_attention_fwd(*bad, geometry)
    for seal, window, sink in ((20, 0, 2), (6, 5, 2), (40, 5, 2), (41, 5, 2), (20, 5, -1)):
        with pytest.raises(ValueError, match="o1_attention"):
            o1_attention_fwd(q, k, v, M, Geometry(seal, window, sink, 0.5))
    with pytest.raises(ValueError, match="segment_means"):
        o1_attention_fwd(q, k, v, torch.eye(21, dtype=torch.float64).expand(2, 3, 2, 21, 21), geometry)
    _, saved = o1_attention_fwd(q, k, v, M, geometry)
    for bad_dout in (dout[:1], dout[..., :39, :], dout[..., :2], dout[0]):
        with pytest.raises(ValueError, match="o1_attention"):
            o1_attention_bwd(bad_dout, saved)
