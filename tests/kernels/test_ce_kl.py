from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cortiq_fcd.kernels import ce_kl as kernel
from cortiq_fcd.kernels.ce_kl import CHUNK_BYTES, COPIES, ce_kl, chunk_rows, kl_rows, nll_sum
from tests.oracles import loss as oracle
from tests.oracles.compare import (
    Unchanged,
    assert_close,
    assert_differences,
    assert_no_worse_than,
    assert_within,
    autograd,
)
from tests.oracles.memory import PeakMemory

# N, C, V
SIZES = [(1, 1, 1), (1, 3, 2), (5, 1, 7), (7, 5, 13), (13, 4, 101)]
EPS32 = 2.0**-23


def case(N: int, C: int, V: int, *, size: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """student, teacher, head, targets, another head; logits have a spread of about `size` * sqrt(C)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N, C), (N, C), (V, C), (V, C))
    student, teacher, head, other = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    targets = torch.randint(V, (N,), generator=generator)
    return size * student, size * teacher, head, targets, other


def rows_budget(rows: int, V: int, element_bytes: int) -> int:
    """A budget that makes chunks of this many rows."""
    budget = rows * V * element_bytes * COPIES
    assert chunk_rows(V, element_bytes, COPIES, budget) == rows
    return budget


@pytest.mark.parametrize("own_teacher_head", [False, True])
@pytest.mark.parametrize("kl_weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_oracle(size: tuple[int, int, int], kl_weight: float, own_teacher_head: bool) -> None:
    student, teacher, head, targets, other = case(*size)
    teacher_head = other if own_teacher_head else None
    unchanged = Unchanged(student, teacher, head, targets, other)
    result = ce_kl(student, teacher, head, targets, kl_weight, teacher_head=teacher_head)
    ce = oracle.ce(student, head, targets).mean().item()
    kl = oracle.kl(student, teacher, head, teacher_head).mean().item()
    assert result.ce == pytest.approx(ce, rel=1e-13, abs=1e-14)
    assert result.kl == pytest.approx(kl, rel=1e-13, abs=1e-14)
    one = torch.ones((), dtype=torch.float64)
    _, (want,) = autograd(lambda s: oracle.loss(s, teacher, head, targets, kl_weight, teacher_head), (student,), one)
    assert (result.dhidden - want).abs().max() <= 1e-13 * max(want.abs().max().item(), 1e-2)
    unchanged.check()


@pytest.mark.parametrize(("softcap", "teacher_softcap"), [(2.0, 2.0), (0.5, None), (None, 3.0), (30.0, 5.0)])
@pytest.mark.parametrize("own_teacher_head", [False, True])
def test_oracle_with_soft_caps(softcap: float | None, teacher_softcap: float | None, own_teacher_head: bool) -> None:
    student, teacher, head, targets, other = case(13, 4, 101)
    teacher_head = other if own_teacher_head else None
    unchanged = Unchanged(student, teacher, head, targets, other)
    caps = {"teacher_head": teacher_head, "softcap": softcap, "teacher_softcap": teacher_softcap}
    result = ce_kl(student, teacher, head, targets, 0.7, **caps, budget_bytes=rows_budget(5, 101, 8))
    kl = oracle.kl(student, teacher, head, **caps)
    assert result.ce == pytest.approx(oracle.ce(student, head, targets, softcap).mean().item(), rel=1e-13)
    assert result.kl == pytest.approx(kl.mean().item(), rel=1e-13)
    one = torch.ones((), dtype=torch.float64)
    _, (want,) = autograd(lambda s: oracle.loss(s, teacher, head, targets, 0.7, **caps), (student,), one)
    assert_close("dhidden", result.dhidden, want, 1e-13)
    assert_close("kl_rows", kl_rows(student, teacher, head, **caps), kl, 1e-13)
    nll = oracle.ce(student, head, targets, softcap).sum().item()
    assert nll_sum(student, head, targets, softcap=softcap) == pytest.approx(nll, rel=1e-13)
    unchanged.check()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kl_weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", SIZES[1:])
def test_finite_differences(size: tuple[int, int, int], kl_weight: float, softcap: float | None) -> None:
    student, teacher, head, targets, _ = case(*size)
    caps = {"softcap": softcap, "teacher_softcap": softcap}

    def forward(student: Tensor) -> Tensor:
        result = ce_kl(student, teacher, head, targets, kl_weight, **caps)
        return torch.tensor((1 - kl_weight) * result.ce + kl_weight * result.kl, dtype=torch.float64)

    grads = (ce_kl(student, teacher, head, targets, kl_weight, **caps).dhidden,)
    assert_differences("ce_kl", forward, (student,), grads, torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunk_size_changes_nothing(rows: int, dtype: torch.dtype) -> None:
    """N = 13 rows in chunks of 1, 2, N - 1, N, N + 1."""
    student, teacher, head, targets, _ = case(13, 16, 101)
    student, teacher, head = (x.to(dtype) for x in (student, teacher, head))
    element = student.element_size()
    whole = ce_kl(student, teacher, head, targets, 0.7)
    parts = ce_kl(student, teacher, head, targets, 0.7, budget_bytes=rows_budget(rows, 101, element))
    eps = torch.finfo(dtype).eps
    assert parts.ce == pytest.approx(whole.ce, rel=4 * eps)
    assert parts.kl == pytest.approx(whole.kl, rel=4 * eps)
    assert_close("dhidden", parts.dhidden, whole.dhidden, 8 * eps)
    nll = nll_sum(student, head, targets)
    assert nll_sum(student, head, targets, budget_bytes=rows * 101 * element) == pytest.approx(nll, rel=4 * eps)


def test_loss_does_not_drift_with_the_number_of_chunks() -> None:
    """2003 rows in 1 to 2003 chunks: sums over chunks are f64, so the error does not grow with their number."""
    student, teacher, head, targets, _ = (x.float() if x.is_floating_point() else x for x in case(2003, 8, 31))
    ce = oracle.ce(student, head, targets).mean().item()
    kl = oracle.kl(student, teacher, head).mean().item()
    want = None
    for rows in (1, 2, 7, 100, 2003):
        result = ce_kl(student, teacher, head, targets, 0.7, budget_bytes=rows_budget(rows, 31, 4))
        assert result.ce == pytest.approx(ce, rel=2 * EPS32)
        assert result.kl == pytest.approx(kl, rel=2 * EPS32)
        want = result.dhidden if want is None else want
        assert_close("dhidden", result.dhidden, want, 8 * EPS32)


@pytest.mark.parametrize("kl_weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("V", [101, 5003])
def test_f32_is_no_worse_than_torch(V: int, kl_weight: float) -> None:
    student, teacher, head, targets, _ = case(37, 16, V)
    compare_with_torch(student.float(), teacher.float(), head.float(), targets, kl_weight)


def compare_with_torch(student: Tensor, teacher: Tensor, head: Tensor, targets: Tensor, kl_weight: float) -> None:
    def torch_op(student: Tensor) -> Tensor:
        log_s = functional.log_softmax(student @ head.to(student).T, -1)
        log_t = functional.log_softmax(teacher.to(student) @ head.to(student).T, -1)
        kl = functional.kl_div(log_s, log_t, reduction="batchmean", log_target=True)
        return (1 - kl_weight) * functional.nll_loss(log_s, targets) + kl_weight * kl

    want, (dwant,) = autograd(torch_op, (student.double(),), torch.ones((), dtype=torch.float64))
    rival, (drival,) = autograd(torch_op, (student,), torch.ones(()))
    result = ce_kl(student, teacher, head, targets, kl_weight)
    loss = torch.tensor((1 - kl_weight) * result.ce + kl_weight * result.kl)
    assert_no_worse_than("loss", loss, rival, want)
    assert_no_worse_than("dhidden", result.dhidden, drival, dwant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("V", [2, 1009, 250_000])
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_kl_to_itself_is_zero(V: int, size: float, dtype: torch.dtype) -> None:
    """Up to rounding: a matrix product may round the same row differently elsewhere, which moves logits by an ulp."""
    student, _, head, targets, _ = case(3, 4, V, size=size)
    student, head = student.to(dtype), head.to(dtype)
    eps = torch.finfo(dtype).eps
    bound = 2 * eps + (eps * 16 * size) ** 2
    for rows in (1, 2, 3):
        budget = rows_budget(rows, V, student.element_size())
        result = ce_kl(student, student.clone(), head, targets, 1.0, budget_bytes=budget)
        assert 0 <= result.kl <= bound
        assert result.dhidden.abs().max() <= 16 * size * 4 * eps
    assert ((kl_rows(student, student.clone(), head) >= 0) & (kl_rows(student, student.clone(), head) <= bound)).all()
    # Separate but equal heads: the same product twice, and nothing is left.
    result = ce_kl(student, student.clone(), head, targets, 1.0, teacher_head=head.clone())
    assert result.kl == 0
    assert (result.dhidden == 0).all()


@pytest.mark.parametrize("V", [2, 1009, 250_000])
def test_small_kl_is_never_negative(V: int) -> None:
    """Logits that differ by `change`: KL is about change^2 / 2, its f32 noise 2 ulp of 1 for any vocabulary."""
    student, teacher, head, _, _ = case(4, 4, V)
    for change in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6):
        near, far, rounded_head = (x.float() for x in (student + change * teacher, student, head))
        want = oracle.kl(near, far, rounded_head)
        got = kl_rows(near, far, rounded_head)
        assert (got >= 0).all()
        assert_within(f"KL at {change}", got, want, torch.tensor(2 * EPS32 * (1 + 8 * change)))


@pytest.mark.parametrize("kl_weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_stay_finite(dtype: torch.dtype, kl_weight: float) -> None:
    student, teacher, head, targets, _ = case(11, 4, 101)
    size = 1e4 / torch.cat((student, teacher)).matmul(head.T).abs().max().item()
    student, teacher, head = (student * size).to(dtype), (teacher * size).to(dtype), head.to(dtype)
    result = ce_kl(student, teacher, head, targets, kl_weight)
    assert math.isfinite(result.ce)
    assert math.isfinite(result.kl)
    rounding = 1e4 * torch.finfo(dtype).eps
    assert result.ce == pytest.approx(oracle.ce(student, head, targets).mean().item(), abs=4 * rounding)
    assert result.kl == pytest.approx(oracle.kl(student, teacher, head).mean().item(), abs=4 * rounding)
    _, (want,) = autograd(
        lambda s: oracle.loss(s, teacher, head, targets, kl_weight),
        (student.double(),),
        torch.ones((), dtype=torch.float64),
    )
    assert_close("dhidden", result.dhidden, want, 4 * rounding)
    nll = oracle.ce(student, head, targets).sum().item()
    assert nll_sum(student, head, targets) == pytest.approx(nll, abs=44 * rounding)


@pytest.mark.parametrize("own_teacher_head", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_kl_rows(size: tuple[int, int, int], own_teacher_head: bool) -> None:
    student, teacher, head, _, other = case(*size)
    teacher_head = other if own_teacher_head else None
    unchanged = Unchanged(student, teacher, head, other)
    got = kl_rows(student, teacher, head, teacher_head=teacher_head)
    want = oracle.kl(student, teacher, head, teacher_head)
    assert_within("kl", got, want, 1e-13 * want + 1e-14)
    unchanged.check()


@pytest.mark.parametrize("size", SIZES)
def test_nll_sum(size: tuple[int, int, int]) -> None:
    student, _, head, targets, _ = case(*size)
    unchanged = Unchanged(student, head, targets)
    want = oracle.ce(student, head, targets).sum().item()
    assert nll_sum(student, head, targets) == pytest.approx(want, rel=1e-13, abs=1e-14)
    f32 = nll_sum(student.float(), head.float(), targets)
    assert f32 == pytest.approx(
        oracle.ce(student.float(), head.float(), targets).sum().item(), rel=4 * EPS32, abs=EPS32
    )
    unchanged.check()


def test_a_large_vocabulary() -> None:
    """dhidden ends in a product over 250,000 entries, whose f32 error torch shares: hence the rule against torch."""
    student, teacher, head, targets, _ = case(3, 8, 250_000)
    student, teacher, head = student.float(), teacher.float(), head.float()
    result = ce_kl(student, teacher, head, targets, 0.7)
    assert result.ce == pytest.approx(oracle.ce(student, head, targets).mean().item(), rel=4 * EPS32)
    assert result.kl == pytest.approx(oracle.kl(student, teacher, head).mean().item(), rel=4 * EPS32)
    compare_with_torch(student, teacher, head, targets, 0.7)


def test_chunk_rows_honours_the_budget() -> None:
    for V in (2, 513, 49_152, 250_001):
        for element in (2, 4, 8):
            rows = chunk_rows(V, element, 4)
            assert rows * V * element * 4 <= CHUNK_BYTES < (rows + 1) * V * element * 4
    assert chunk_rows(250_000, 8, 4, budget_bytes=1) == 1


@pytest.mark.parametrize("rows", [1, 2, 12, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_part_size_changes_nothing(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 and 6 rows, visited 1, 2 or all rows at a time."""
    student, teacher, head, targets, _ = case(13, 16, 101)
    student, teacher, head = (x.to(dtype) for x in (student, teacher, head))
    whole = [ce_kl(student, teacher, head, targets, 0.7, softcap=cap) for cap in (None, 5.0)]
    kl, nll = kl_rows(student, teacher, head), nll_sum(student, head, targets)
    monkeypatch.setattr(kernel, "PART_BYTES", rows * 101 * 4)
    budget = rows_budget(7, 101, student.element_size())
    eps = torch.finfo(dtype).eps
    for want, cap in zip(whole, (None, 5.0), strict=True):
        parts = ce_kl(student, teacher, head, targets, 0.7, softcap=cap, budget_bytes=budget)
        assert parts.ce == pytest.approx(want.ce, rel=4 * EPS32)
        assert parts.kl == pytest.approx(want.kl, rel=4 * EPS32)
        assert_close("dhidden", parts.dhidden, want.dhidden, 8 * eps)
    assert_close("kl_rows", kl_rows(student, teacher, head), kl, 8 * EPS32)
    assert nll_sum(student, head, targets) == pytest.approx(nll, rel=4 * EPS32)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("own_teacher_head", [False, True])
def test_peak_memory_is_the_budget(
    rows: int, own_teacher_head: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors alive at once, beyond the inputs: the chunk's logits, temporaries of one part of it, and dhidden."""
    N, C, V = 64, 8, 4001
    monkeypatch.setattr(kernel, "PART_BYTES", 2 * V * 4)
    student, teacher, head, targets, other = (x.float() if x.is_floating_point() else x for x in case(N, C, V))
    budget = rows_budget(rows, V, 4)
    caps = {"softcap": softcap, "teacher_softcap": softcap, "teacher_head": other if own_teacher_head else None}
    with PeakMemory() as memory:
        ce_kl(student, teacher, head, targets, 0.7, budget_bytes=budget, **caps)
    small = 8 * N * (C + 8) * 4 + 4 * kernel.PART_BYTES
    assert budget < memory.peak_bytes <= budget + small
    with PeakMemory() as memory:
        nll_sum(student, head, targets, budget_bytes=budget, softcap=softcap)
    assert memory.peak_bytes <= budget + small


def test_bad_shapes_are_refused() -> None:
    student, teacher, head, targets, other = case(5, 3, 7)
    for bad in (
        (student[0], teacher[0], head, targets),
        (student, teacher[:4], head, targets),
        (student, teacher[:, :2], head, targets),
        (student, teacher, head[:, :2], targets),
        (student, teacher, head[0], targets),
        (student, teacher, head, targets[:4]),
        (student, teacher, head, targets[:, None]),
        (student[:0], teacher[:0], head, targets[:0]),
    ):
        with pytest.raises(ValueError, match="ce_kl"):
            ce_kl(*bad, 0.5)
    for bad_head in (other[:6], other[:, :2], other[0]):
        with pytest.raises(ValueError, match="ce_kl"):
            ce_kl(student, teacher, head, targets, 0.5, teacher_head=bad_head)
        with pytest.raises(ValueError, match="ce_kl"):
            kl_rows(student, teacher, head, teacher_head=bad_head)
    with pytest.raises(ValueError, match="ce_kl"):
        kl_rows(student, teacher[:4], head)
    for bad_hidden, bad_head, bad_targets in ((student[:4], head, targets), (student, head[:, :2], targets)):
        with pytest.raises(ValueError, match="ce_kl"):
            nll_sum(bad_hidden, bad_head, bad_targets)


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("temperature", [0.5, 2.0, 4.0])
def test_temperature(temperature: float, softcap: float | None) -> None:
    """Against autograd over tempered logits, in several chunks."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(11, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(17, 5, generator=generator, dtype=torch.float64)
    targets = torch.arange(11)
    leaf = student.clone().requires_grad_()

    def log_p(rows: Tensor, tau: float) -> Tensor:
        z = rows @ head.T
        return torch.log_softmax((z if softcap is None else softcap * torch.tanh(z / softcap)) / tau, -1)

    ce = -log_p(leaf, 1.0).gather(1, targets[:, None]).mean()
    soft_s, soft_t = log_p(leaf, temperature), log_p(teacher, temperature)
    kl = (soft_t.exp() * (soft_t - soft_s)).sum(-1).mean() * temperature**2
    (0.3 * ce + 0.7 * kl).backward()
    caps = {"softcap": softcap, "teacher_softcap": softcap}
    got = ce_kl(student, teacher, head, targets, 0.7, temperature=temperature, **caps, budget_bytes=17 * 8 * 2 * 3)
    assert got.ce == pytest.approx(ce.item(), rel=1e-12)
    assert got.kl == pytest.approx(kl.item(), rel=1e-11)
    assert leaf.grad is not None
    assert_close("dhidden", got.dhidden, leaf.grad, 1e-12)
