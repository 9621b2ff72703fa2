"""The loss with bf16 hidden states and head."""

from __future__ import annotations

import pytest
import torch

from cortiq_fcd.kernels.ce_kl import ce_kl, kl_rows, nll_sum
from tests.kernels.test_ce_kl import SIZES, case
from tests.oracles import loss as oracle
from tests.oracles.compare import Unchanged, assert_within, autograd


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", SIZES)
def test_bf16_rounds_the_logits_once(size: tuple[int, int, int], softcap: float | None) -> None:
    """The products round their logits to bf16; whatever follows is f32. So a row's losses move by at most what its
    logits moved, half an ulp of the largest, twice over for a difference of two."""
    student, teacher, head, targets, _ = case(*size)
    student, teacher, head = (x.bfloat16() for x in (student, teacher, head))
    unchanged = Unchanged(student, teacher, head, targets)
    logits = torch.cat((student, teacher)).double() @ head.double().T
    rounding = torch.finfo(torch.bfloat16).eps / 2
    moved = 2 * rounding * logits.abs().max().item() + 1e-6
    nll = oracle.ce(student, head, targets, softcap)
    assert nll_sum(student, head, targets, softcap=softcap) == pytest.approx(nll.sum().item(), abs=len(nll) * moved)
    caps = {"softcap": softcap, "teacher_softcap": softcap}
    want = oracle.kl(student, teacher, head, **caps)
    got = kl_rows(student, teacher, head, **caps)
    assert got.dtype == torch.float32
    spread = 2 * moved * (1 + 2 * logits.abs().max().item())
    assert_within("kl", got, want, torch.tensor(spread))
    result = ce_kl(student, teacher, head, targets, 0.7, **caps)
    assert result.ce == pytest.approx(nll.mean().item(), abs=moved)
    assert result.kl == pytest.approx(want.mean().item(), abs=spread)
    assert result.dhidden.dtype == torch.bfloat16
    one = torch.ones((), dtype=torch.float64)
    _, (dwant,) = autograd(
        lambda s: oracle.loss(s, teacher.double(), head.double(), targets, 0.7, **caps), (student.double(),), one
    )
    # dz moves by p dz; the product with the head and the division by N round once more each.
    bound = (2 * moved + 4 * rounding) * head.double().abs().sum(0).max().item() / len(nll)
    assert_within("dhidden", result.dhidden, dwant, torch.tensor(bound))
    unchanged.check()
