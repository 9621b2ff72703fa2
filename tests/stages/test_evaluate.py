"""The figures before and after: on which windows, and that they are what they are called."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.perplexity import window_perplexity
from cortiq_fcd.model.replica import Replica, hidden_states, new_replica
from cortiq_fcd.model.windows import validation_offsets, windows
from cortiq_fcd.stages import evaluate
from cortiq_fcd.stages.config import TrainConfig
from tests.fixtures import Tiny, in_f64
from tests.oracles import loss

CONFIG = TrainConfig(batch=2, seq=40)
SETTING = Conversion((0, 1), "all", m=6, w=5, sink=2, seal=20)
MODEL = Tiny(layers=2)
VAL = np.random.default_rng(4).integers(0, MODEL.V, 2500)


@given(
    tokens=st.integers(3, 4000),
    seq=st.integers(2, 200),
    batch=st.integers(1, 5),
    gate=st.lists(st.integers(0, 3500), max_size=3),
    gate_tokens=st.integers(1, 400),
)
def test_untouched_windows_touch_nothing(tokens: int, seq: int, batch: int, gate: list[int], gate_tokens: int) -> None:
    """Not one token, shifted targets included, of a window that chose, measured or judged."""
    tokens = max(tokens, seq + 1)
    gate_tokens = min(gate_tokens, tokens)
    gate = [min(offset, tokens - gate_tokens) for offset in gate]
    config = TrainConfig(batch=batch, seq=seq)
    where = evaluate.select_windows(config, np.zeros(tokens, np.int64), tuple(gate), gate_tokens)
    assert list(where.final) == validation_offsets(tokens, seq, 6 * batch)
    used = np.zeros(tokens, bool)
    for offset in [*validation_offsets(tokens, seq, 2 * batch), *where.final]:
        used[offset : offset + seq + 1] = True
    for offset in gate:
        used[offset : offset + gate_tokens] = True
    assert len(where.untouched) <= 2 * batch
    for offset in where.untouched:
        assert 0 <= offset <= tokens - seq - 1
        assert not used[offset : offset + seq + 1].any()
        used[offset : offset + seq + 1] = True  # nor one another
    # None are given only if there are none.
    if not where.untouched:
        free = np.convolve(~used, np.ones(seq + 1, int), "valid") == seq + 1
        assert not free.any()


def moved(setting: Conversion) -> Replica:
    replica = new_replica(in_f64(MODEL.weights()), setting)
    flat = replica.masters.flat
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(0), dtype=flat.dtype), alpha=0.05)
    return replica


def test_figures_of_student_and_teacher() -> None:
    replica = moved(SETTING)
    where = evaluate.select_windows(CONFIG, VAL, (100, 900), 400)
    assert where.untouched
    head = replica.weights.head
    ids, targets = windows(VAL, list(where.final), 40, torch.device("cpu"))
    teacher = hidden_states(replica, ids, student=False).unflatten(0, ids.shape)[:, 20:].flatten(0, 1)
    student = hidden_states(replica, ids, student=True, seal=20).unflatten(0, ids.shape)[:, 20:].flatten(0, 1)
    tail = targets[:, 20:].flatten()

    found = evaluate.run(CONFIG, replica, where, student=True)
    assert found.final == window_perplexity(replica, VAL, 40, 2, 6, student=True)
    assert found.served == pytest.approx(loss.ce(student, head, tail).mean().exp().item(), rel=1e-8)
    assert found.kl_served == pytest.approx(loss.kl(student, teacher, head).mean().item(), rel=1e-7)
    assert found.kl_served > 1e-3
    ids, targets = windows(VAL, list(where.untouched), 40, torch.device("cpu"))
    rows = hidden_states(replica, ids, student=True, seal=20)
    assert found.untouched == pytest.approx(loss.ce(rows, head, targets.flatten()).mean().exp().item(), rel=1e-10)

    found = evaluate.run(CONFIG, replica, where, student=False)
    assert found.final == window_perplexity(replica, VAL, 40, 2, 6, student=False)
    assert found.served == pytest.approx(loss.ce(teacher, head, tail).mean().exp().item(), rel=1e-12)
    assert found.kl_served == 0


def test_a_seal_at_the_end_leaves_nothing_to_serve() -> None:
    """Not a number rather than 0: the report shows null."""
    replica = moved(Conversion((0, 1), "all", m=6, w=5, sink=2, seal=40))
    where = evaluate.select_windows(CONFIG, VAL, (), 400)
    found = evaluate.run(CONFIG, replica, where, student=True)
    assert math.isnan(found.served)
    assert math.isnan(found.kl_served)
    assert math.isfinite(found.final)


def test_a_text_without_a_free_window() -> None:
    replica = moved(SETTING)
    where = evaluate.select_windows(CONFIG, VAL[:100], (), 400)
    assert where.untouched == ()
    assert evaluate.run(CONFIG, replica, where, student=True).untouched is None


def test_a_teacher_that_was_measured_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the student's figures are the same, bit for bit."""
    replica = moved(SETTING)
    where = evaluate.select_windows(CONFIG, VAL, (100, 900), 400)
    alone = evaluate.run(CONFIG, replica, where, student=True)
    rows = evaluate.TeacherRows()
    evaluate.run(CONFIG, replica, where, student=False, teacher=rows)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the teacher ran again")

    monkeypatch.setattr(evaluate, "hidden_batches", fail)
    assert evaluate.run(CONFIG, replica, where, student=True, teacher=rows) == alone
