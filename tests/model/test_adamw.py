"""AdamW with the clip against torch.optim.AdamW fed with gradients that were clipped by the same formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.model import stored_moments
from cortiq_fcd.model.adamw import SLICE, Moments, adamw_step, gradient_norm, new_moments
from cortiq_fcd.model.stored_moments import StoredMoments, zeros
from tests.oracles.adamw import adamw
from tests.oracles.compare import assert_no_worse_than, worst_error

STEPS = 12


def problem(size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A start and gradients whose norms lie on both sides of 1; some entries are tiny, some exactly 0."""
    generator = torch.Generator().manual_seed(size)
    start = torch.randn(size, generator=generator, dtype=dtype)
    gradients = []
    for step in range(STEPS):
        gradient = torch.randn(size, generator=generator, dtype=dtype)
        if size > 1:
            gradient[:: max(2, size // 7)] *= 1e-9
            gradient[size // 2] = 0
        gradients.append(gradient * (10.0 ** ((step % 5) - 3)) / size**0.5)
    return start, gradients


def ours(start: Tensor, gradients: list[Tensor], lr: float) -> tuple[Tensor, list[float], Moments]:
    parameters = start.clone()
    moments = new_moments(parameters)
    norms = []
    for gradient in gradients:
        norms.append(gradient_norm(gradient))
        adamw_step(parameters, gradient, moments, lr, norms[-1])
    return parameters, norms, moments


# Sizes around the slices that are worked on one after the other.
SIZES = [1, 7, 1000, SLICE, SLICE + 1, 2 * SLICE + 13]


@pytest.mark.parametrize("size", SIZES)
def test_f64(size: int) -> None:
    start, gradients = problem(size, torch.float64)
    got, norms, moments = ours(start, gradients, 3e-3)
    want, want_norms = adamw(start, gradients, 3e-3)
    # Of the displacement, not of the parameters: what matters is the step.
    assert worst_error(got - start, want - start) < 1e-12
    assert norms == pytest.approx(want_norms, rel=1e-14)
    assert any(norm > 1 for norm in norms)
    assert any(norm < 1 for norm in norms)
    assert moments.steps == STEPS


@pytest.mark.parametrize("size", SIZES)
def test_f32(size: int) -> None:
    start, gradients = problem(size, torch.float32)
    got, norms, _ = ours(start, gradients, 3e-3)
    rival, _ = adamw(start, gradients, 3e-3)
    want, want_norms = adamw(start.double(), [g.double() for g in gradients], 3e-3)
    assert_no_worse_than("parameters", got, rival, want)
    assert norms == pytest.approx(want_norms, rel=1e-6)


@pytest.mark.parametrize("constant", ["BETA1", "BETA2", "EPS", "WEIGHT_DECAY", "MAX_NORM"])
def test_each_constant_matters(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees every constant: one percent (of 1 - beta for the betas) is far outside its tolerance."""
    from cortiq_fcd.model import adamw as module

    start, gradients = problem(1000, torch.float64)
    want, _ = adamw(start, gradients, 3e-3)
    value = getattr(module, constant)
    monkeypatch.setattr(module, constant, 1 - (1 - value) * 1.01 if constant.startswith("BETA") else value * 1.01)
    assert worst_error(ours(start, gradients, 3e-3)[0] - start, want - start) > 1e-9


def test_a_gradient_at_the_clip_is_not_scaled() -> None:
    """norm > 1 is clipped, norm == 1 is not."""
    gradient = torch.tensor([0.6, 0.8], dtype=torch.float64)
    moments = new_moments(gradient)
    adamw_step(torch.zeros_like(gradient), gradient, moments, 1e-3, 1.0)
    torch.testing.assert_close(moments.first, gradient * 0.1, rtol=1e-15, atol=0)
    moments = new_moments(gradient)
    adamw_step(torch.zeros_like(gradient), gradient * 2, moments, 1e-3, 2.0)
    torch.testing.assert_close(moments.first, gradient * 2 / (2 + 1e-6) * 0.1, rtol=1e-15, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, SLICE, SLICE + 4])
def test_the_norm_of_a_gradient_with_one_bad_entry_is_not_finite(value: float, place: int) -> None:
    gradient = torch.ones(SLICE + 5)
    gradient[place] = value
    assert not torch.tensor(gradient_norm(gradient)).isfinite()


def test_the_gradient_is_left_alone() -> None:
    gradient = torch.full((5,), 3.0)
    adamw_step(torch.zeros(5), gradient, new_moments(gradient), 1e-3, gradient_norm(gradient))
    assert torch.equal(gradient, torch.full((5,), 3.0))


@pytest.mark.parametrize("size", SIZES)
def test_moments_in_a_file_give_the_same_bits(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_moments, "PIECE", SLICE)
    start, gradients = problem(size, torch.float32)
    want, norms, in_memory = ours(start, gradients, 3e-3)
    got, on_disk = start.clone(), StoredMoments(tmp_path / "moments", zeros(size), zeros(size))
    for gradient, norm in zip(gradients, norms, strict=True):
        adamw_step(got, gradient, on_disk, 3e-3, norm)
    assert torch.equal(got, want)
    assert on_disk.steps == in_memory.steps
    for stored, moment in ((on_disk.first, in_memory.first), (on_disk.second, in_memory.second)):
        assert np.concatenate([piece.copy() for piece in stored.pieces()]).tobytes() == moment.numpy().tobytes()
