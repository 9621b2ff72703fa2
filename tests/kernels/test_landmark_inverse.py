from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.kernels import landmark_inverse as module
from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from tests.oracles import attention as oracle
from tests.oracles.compare import Unchanged, assert_close, worst_error


def case(*shape: int, size: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (size * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k


def exact_inverse(q: Tensor, k: Tensor, scale: float, ridge: float = 1e-6) -> mpmath.matrix:
    """M of one head at 400 digits, straight from the definition."""
    with mpmath.workdps(400):
        logits = mpmath.matrix(q.tolist()) * mpmath.matrix(k.tolist()).T * mpmath.mpf(scale)
        kernel = logits.apply(mpmath.exp)
        gram = kernel.T * kernel
        m = gram.rows
        shift = mpmath.mpf(ridge) * mpmath.fsum(gram[i, i] for i in range(m)) / m
        return mpmath.inverse(gram + shift * mpmath.eye(m)) * kernel.T


@pytest.mark.parametrize(("m", "D"), [(1, 1), (2, 3), (4, 7), (5, 2), (8, 16)])
def test_against_400_digits(m: int, D: int) -> None:
    """The condition of Au^T Au + lambda I is at most m / 1e-6, which is what f64 may lose: 1e7 * 1e-16."""
    q, k = case(m, D)
    unchanged = Unchanged(q, k)
    want = torch.tensor(np.array(exact_inverse(q, k, 0.5).tolist(), dtype=float))
    assert_close("M", landmark_inverse(q, k, 0.5), want, 1e-8)
    unchanged.check()


@pytest.mark.parametrize("size", [600.0, 350.0, -600.0])
def test_huge_logits(size: float) -> None:
    """The largest logit is +-600: Au^T Au itself would overflow from 355 on. M is compared at its own scale."""
    q, k = case(4, 3)
    q, k = q.abs() + 0.5, k.abs() + 0.5
    # Largest logit 600; or all logits between -600 and about -570.
    spread = (q @ k.T).max().item() if size > 0 else (q @ k.T).min().item()
    scale = size / spread
    if size < 0:
        q, k = torch.cat((q, q.new_full((4, 1), 24.0)), 1), torch.cat((k, k.new_full((4, 1), 24.0)), 1)
        scale = -600 / (q @ k.T).max().item()
    top = (q @ k.T * scale).max().item()
    want = exact_inverse(q, k, scale)
    with mpmath.workdps(400):
        want = want * mpmath.exp(mpmath.mpf(top))
        scaled = torch.tensor(np.array(want.tolist(), dtype=float))
    got = landmark_inverse(q, k, scale)
    assert got.isfinite().all()
    assert_close("M at its own scale", got * np.exp(top), scaled, 1e-6)


def test_f32_input_is_computed_in_f64() -> None:
    q, k = (x.float() for x in case(2, 5, 8))
    got = landmark_inverse(q, k, 0.3)
    assert got.dtype == torch.float64
    assert_close("M", got, oracle.landmark_inverse(q, k, 0.3), 1e-9)


def test_leading_axes_broadcast() -> None:
    q, k = case(2, 3, 4, 5, 6)[0], case(2, 3, 1, 5, 6, seed=1)[1]
    got = landmark_inverse(q, k, 0.4)
    assert got.shape == (2, 3, 4, 5, 5)
    for i in np.ndindex(2, 3, 4):
        single = landmark_inverse(q[i], k[i[0], i[1], 0], 0.4)
        # Batched LAPACK calls may order their sums otherwise; the condition of 1e6 shows.
        assert worst_error(got[i], single) < 1e-9


def test_equal_landmarks_are_solved_by_the_ridge() -> None:
    """Au has rank one; the ridge alone makes the gram invertible, without a retry."""
    q, k = (x[:1].expand(4, -1) for x in case(4, 3))
    want = torch.tensor(np.array(exact_inverse(q, k, 0.5).tolist(), dtype=float))
    # Here M is the minimum-norm solution up to 1e-6; what f64 loses is the condition, 4e6 * 1e-16.
    assert_close("M", landmark_inverse(q, k, 0.5), want, 1e-8)


def cholesky_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the matrices that are factored."""
    seen: list[Tensor] = []
    factor = torch.linalg.cholesky_ex

    def record(matrix: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(matrix.clone())
        return factor(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", record)
    return seen


def test_ridge_grows_until_the_factorisation_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a ridge of 1e-20 a gram of rank one fails at first; a full-rank one beside it keeps its own ridge."""
    monkeypatch.setattr(module, "RIDGE", 1e-20)
    q, k = case(2, 3, 3)
    q[0], k[0] = q[0, :1], k[0, :1]
    seen = cholesky_calls(monkeypatch)
    got = landmark_inverse(q, k, 0.5)
    monkeypatch.undo()
    assert 2 < len(seen) <= module.MAX_TRIES
    for earlier, later in itertools.pairwise(seen):
        assert torch.equal(earlier[1], later[1])
    ridge = 1e-20 * 10.0 ** (len(seen) - 1)
    assert torch.linalg.cholesky_ex(seen[-2][0]).info != 0
    assert torch.linalg.cholesky_ex(seen[-1][0]).info == 0
    exact = torch.tensor(np.array(exact_inverse(q[0], k[0], 0.5, ridge).tolist(), dtype=float))
    # A ridge this small leaves few digits in f64; sums of columns of the minimum-norm solution survive.
    assert got.isfinite().all()
    assert_close("sums of M", got[0].sum(), exact.sum(), 1e-2)
    well = torch.tensor(np.array(exact_inverse(q[1], k[1], 0.5, 0.0).tolist(), dtype=float))
    assert_close("full rank", got[1], well, 1e-6)


def test_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ridge a singular gram fails all 12 tries: M = I / mean(diag(Au^T Au))."""
    monkeypatch.setattr(module, "RIDGE", 0.0)
    q, k = case(2, 4, 3)
    q[0], k[0] = q[0, :1], k[0, :1]
    seen = cholesky_calls(monkeypatch)
    got = landmark_inverse(q, k, 0.5)
    assert len(seen) == module.MAX_TRIES == 12
    kernel = (q @ k.mT * 0.5).exp()
    mean_diagonal = (kernel.mT @ kernel)[0].diagonal().mean()
    assert_close("singular", got[0], torch.eye(4, dtype=torch.float64) / mean_diagonal, 1e-13)
    assert_close("regular", got[1], torch.linalg.inv(kernel[1]), 1e-6)


def test_nan_stays_nan() -> None:
    """Poisoned weights must show, not turn into a plausible M."""
    q, k = case(3, 2)
    q[0, 0] = torch.nan
    assert landmark_inverse(q, k, 0.5).isnan().any()


def test_bad_shapes_are_refused() -> None:
    q, k = case(2, 4, 3)
    for bad_q, bad_k in ((q[:, :3], k), (q, k[..., :2]), (q, k[0, 0]), (q[0, 0], k[0, 0]), (q[0, 0, 0], k[0, 0, 0])):
        with pytest.raises(ValueError, match="landmark_inverse"):
            landmark_inverse(bad_q, bad_k, 0.5)


def test_bf16_input_is_computed_in_f64() -> None:
    q, k = (x.bfloat16() for x in case(2, 5, 8))
    got = landmark_inverse(q, k, 0.3)
    assert got.dtype == torch.float64
    assert_close("M", got, oracle.landmark_inverse(q, k, 0.3), 1e-9)
