"""The served form against the teacher-forced one and against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels.o1_attention import Geometry, o1_attention_fwd
from cortiq_fcd.kernels.o1_stream import StreamState, seal_stream, stream_step
from tests.kernels.test_o1_attention import ROUNDING, clear_rows, dense, frozen_inverse, random_case
from tests.oracles import attention as oracle
from tests.oracles.compare import Unchanged, assert_close, assert_within


def seal(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, m: int) -> StreamState:
    p = geometry.seal
    return seal_stream(
        q[..., :p, :],
        k[:, :, :p],
        v[:, :, :p],
        landmark_count=m,
        window=geometry.window,
        sink=geometry.sink,
        scale=geometry.scale,
    )


def served_rows(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, m: int) -> Tensor:
    """Rows from the seal on, [B, G, R, T - seal, Dv], one token at a time."""
    state = seal(q, k, v, geometry, m)
    steps = range(geometry.seal, q.shape[3])
    return torch.stack([stream_step(state, q[..., t, :], k[:, :, t], v[:, :, t]) for t in steps], 3)


# B, G, R, window, sink, m, seal
GEOMETRIES = [
    (1, 1, 1, 1, 0, 4, 13),
    (2, 1, 3, 1, 4, 4, 14),
    (1, 2, 2, 5, 0, 1, 6),
    (2, 3, 2, 7, 2, 5, 18),
    (3, 1, 1, 16, 2, 8, 64),
    (1, 2, 3, 33, 3, 6, 48),
]


@pytest.mark.parametrize(("B", "G", "R", "window", "sink", "m", "prompt"), GEOMETRIES)
def test_f64_equals_the_teacher_forced_rows(
    B: int, G: int, R: int, window: int, sink: int, m: int, prompt: int
) -> None:
    geometry = Geometry(prompt, window, sink, 0.5)
    q, k, v, _ = random_case(prompt + 3 * window + 29, B=B, G=G, R=R, D=5)
    unchanged = Unchanged(q, k, v)
    M = frozen_inverse(q, k, geometry, m)
    got = served_rows(q, k, v, geometry, m)
    assert_close("teacher-forced", got, o1_attention_fwd(q, k, v, M, geometry)[0][..., prompt:, :], 1e-10)
    assert_close("definition", got, dense(q, k, v, M, geometry).out[..., prompt:, :], 1e-10)
    unchanged.check()


@pytest.mark.parametrize("tail", [1, 4, 5, 6])
def test_tails_around_the_window(tail: int) -> None:
    geometry = Geometry(20, 5, 2, 0.5)
    q, k, v, _ = random_case(20 + tail, G=2, R=2)
    M = frozen_inverse(q, k, geometry, 4)
    got = served_rows(q, k, v, geometry, 4)
    assert_close("rows", got, o1_attention_fwd(q, k, v, M, geometry)[0][..., 20:, :], 1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_f32_is_within_the_rows_own_noise(seed: int) -> None:
    """|difference| <= 16 * 2^-24 * kappa * max(max|v|, max|out|) per row, rows at the guard's jump left out."""
    geometry, m = Geometry(64, 20, 4, 16**-0.5), 8
    q, k, v, _ = (x.float() for x in random_case(150, B=2, G=2, R=2, D=16, Dv=16, seed=seed))
    M = frozen_inverse(q, k, geometry, m)
    joint = dense(q.double(), k.double(), v.double(), M, geometry)
    forced = o1_attention_fwd(q, k, v, M, geometry)[0][..., 64:, :]
    served = served_rows(q, k, v, geometry, m)
    assert served.dtype == torch.float32
    allowed = 16 * ROUNDING * joint.kappa * torch.maximum(v.abs().max(), joint.out.abs().amax(-1))
    allowed = torch.where(clear_rows(joint, 64), allowed, torch.inf)[..., 64:, None]
    assert_within("served and teacher-forced", served, forced, allowed)
    assert_within("served and f64", served, joint.out[..., 64:, :], allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("late", [None, 30, 35, 41, 44, 60])
def test_large_logits(late: int | None, dtype: torch.dtype) -> None:
    """Logits up to 200 everywhere, or one key (late) whose landmark logits are 200 above all others."""
    geometry, m = Geometry(36, 8, 2, 8**-0.5), 4
    q, k, v, _ = random_case(80, R=2, D=8, seed=1)
    if late is None:
        top = oracle.default_scale(8) * (q @ k[:, :, None].mT).abs().max().item()
        q, k = (x * (200 / top) ** 0.5 for x in (q, k))
    else:
        q[..., 0], k[..., 0] = 0, 0
        q[..., :36, 0] = 30
        k[..., late, 0] = 20
    q, k, v = (x.to(dtype) for x in (q, k, v))
    M = frozen_inverse(q, k, geometry, m)
    joint = dense(q.double(), k.double(), v.double(), M, geometry)
    clear = clear_rows(joint, 36) & (joint.kappa < 1e4)
    assert clear.float().mean() > 0.5
    served = served_rows(q, k, v, geometry, m)
    assert served.isfinite().all()
    rounding = torch.finfo(dtype).eps / 2
    allowed = 4 * 200 * rounding * joint.kappa * torch.maximum(v.abs().max().double(), joint.out.abs().amax(-1))
    allowed = torch.where(clear, allowed, torch.inf)[..., 36:, None]
    assert_within("served", served, joint.out[..., 36:, :], allowed)
    assert_within("teacher-forced", served, o1_attention_fwd(q, k, v, M, geometry)[0][..., 36:, :], allowed)


def test_guard_decides_like_the_definition() -> None:
    geometry, m = Geometry(40, 9, 2, 8**-0.5), 5
    q, k, v, _ = random_case(96, B=2, G=2, R=2, D=8, Dv=5, seed=222)
    joint = dense(q, k, v, frozen_inverse(q, k, geometry, m), geometry)
    assert int((~joint.kept).sum()) >= 10
    assert_close("rows", served_rows(q, k, v, geometry, m), joint.out[..., 40:, :], 1e-10)


def test_state_does_not_grow() -> None:
    geometry, m = Geometry(20, 5, 2, 0.5), 4
    q, k, v, _ = random_case(420, B=2, G=3, R=2, D=5, Dv=3)
    state = seal(q, k, v, geometry, m)
    sizes = {name: x.shape for name, x in vars(state).items() if isinstance(x, Tensor)}
    nbytes = state.nbytes
    # M; Qt, run, Z, T a query head; Kt and the near keys and values a kv head.
    per_head = m * m + m * 5 + 2 * m + m * 3
    assert nbytes == 8 * 2 * 3 * (2 * per_head + m * 5 + (2 + 5) * (5 + 3))
    for t in range(20, 420):
        last = stream_step(state, q[..., t, :], k[:, :, t], v[:, :, t])
    assert state.nbytes == nbytes
    assert {name: x.shape for name, x in vars(state).items() if isinstance(x, Tensor)} == sizes
    # 400 tokens later the sums still hold every key exactly once.
    joint = dense(q, k, v, frozen_inverse(q, k, geometry, m), geometry)
    assert_close("row 419", last, joint.out[..., 419, :], 1e-10)


def test_sequences_of_a_batch_do_not_mix() -> None:
    geometry = Geometry(20, 5, 2, 0.5)
    q, k, v, _ = random_case(50, B=3, G=2, R=2)
    together = served_rows(q, k, v, geometry, 4)
    for b in range(3):
        alone = served_rows(q[b : b + 1], k[b : b + 1], v[b : b + 1], geometry, 4)
        assert_close(f"sequence {b}", together[b : b + 1], alone, 1e-11)


def test_state_keeps_no_view_of_its_inputs() -> None:
    geometry = Geometry(20, 5, 2, 0.5)
    q, k, v, _ = random_case(30)
    want = served_rows(q, k, v, geometry, 4)
    state = seal(q, k, v, geometry, 4)
    k[:, :, :20], v[:, :, :20] = torch.nan, torch.nan
    for t in range(20, 30):
        step_k, step_v = k[:, :, t].clone(), v[:, :, t].clone()
        assert torch.equal(stream_step(state, q[..., t, :], step_k, step_v), want[..., t - 20, :])
        step_k.fill_(torch.nan)
        step_v.fill_(torch.nan)


def test_bad_arguments_are_refused() -> None:
    q, k, v, _ = random_case(20, B=2, G=3, R=2)
    options = {"landmark_count": 4, "window": 5, "sink": 2, "scale": 0.5}
    for bad in (
        (q[0], k, v),
        (q, k[0], v),
        (q, k, v[0]),
        (q[..., :3], k, v),
        (q[..., :19, :], k, v),
        (q, k, v[:, :, :19]),
        (q, k[:, :1], v),
    ):
        with pytest.raises(ValueError, match="seal_stream"):
            seal_stream(*bad, **options)
    for window, sink in ((0, 2), (5, -1), (18, 2), (5, 15), (20, 0)):
        with pytest.raises(ValueError, match="seal_stream"):
            seal_stream(q, k, v, landmark_count=4, window=window, sink=sink, scale=0.5)
    with pytest.raises(ValueError, match="segment_means"):
        seal_stream(q, k, v, landmark_count=21, window=5, sink=2, scale=0.5)
    state = seal_stream(q, k, v, **options)
    step_q, step_k, step_v = q[..., 0, :], k[:, :, 0], v[:, :, 0]
    before = state.near_k.clone()
    for bad in (
        (step_q[:1], step_k, step_v),
        (step_q[..., :3], step_k, step_v),
        (step_q, step_k[:, :1], step_v),
        (step_q, step_k, step_v[:, :1]),
        (step_q, step_k, step_v[..., :1]),
        (step_q[..., :3], step_k[..., :3], step_v),
        (step_q, k, step_v),
    ):
        with pytest.raises(ValueError, match="stream_step"):
            stream_step(state, *bad)
    assert torch.equal(state.near_k, before)
    assert state.slot == 0
