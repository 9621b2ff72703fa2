"""The generation gate: loop scores, prompts, verdicts at the boundary, and that it judges through the served kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.decode import greedy
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.stages import gate
from cortiq_fcd.stages.config import GateConfig
from cortiq_fcd.stages.gate import loop_score, passes
from tests.fixtures import Tiny

SETTING = Conversion((0, 1), "all", m=6, w=16, sink=2, seal=48)


@pytest.mark.parametrize(
    ("ids", "score"),
    [
        ([], 0.0),
        ([1], 0.0),
        ([1, 1, 1, 1], 0.0),  # fewer than 5 ids
        ([1, 1, 1, 1, 1], 0.5),  # two 4-grams, one of them new
        ([1, 2, 3, 4, 5], 0.0),
        ([7] * 60, 1 - 1 / 57),
        ([1, 2] * 30, 1 - 2 / 57),
        ([1, 2, 3, 4] * 15, 1 - 4 / 57),
        (list(range(60)), 0.0),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1 - 5 / 6),  # (1, 2, 3, 4) twice
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 0.0),  # repeated 3-grams are no loop
    ],
)
def test_loop_score(ids: list[int], score: float) -> None:
    assert loop_score(ids) == pytest.approx(score, abs=1e-15)


@pytest.mark.parametrize(
    ("scores", "baseline", "passed"),
    [
        ((0.35, 0.0, 0.0), (0.35, 0.0, 0.0), True),  # exactly the threshold
        ((0.351, 0.0, 0.0), (0.351, 0.0, 0.0), False),
        ((0.10, 0.2, 0.3), (0.0, 0.1, 0.2), True),  # exactly the slack
        ((0.101, 0.0, 0.0), (0.0, 0.5, 0.5), False),
        ((0.0, 0.0, 0.0), (0.9, 0.9, 0.9), True),
        ((0.0, 0.0, 0.36), (0.9, 0.9, 0.9), False),  # one prompt is enough
    ],
)
def test_boundary_values_pass(scores: tuple[float, ...], baseline: tuple[float, ...], passed: bool) -> None:
    assert passes(GateConfig(), scores, baseline) is passed


def test_other_thresholds() -> None:
    config = GateConfig(threshold=0.5, slack=0.0)
    assert passes(config, (0.5,), (0.5,))
    assert not passes(config, (0.4,), (0.3,))


def prompts(tokens: int = 1000, **changes: object) -> gate.Prompts:
    val = np.arange(tokens)
    setting = replace(SETTING, **{k: v for k, v in changes.items() if k in ("w", "sink")})
    return gate.select_prompts(GateConfig(enabled=bool(changes.get("enabled", True))), val, setting)


@pytest.mark.parametrize(
    ("tokens", "offsets"), [(900, (40, 200, 320)), (1000, (50, 250, 400)), (1509, (100, 504, 807))]
)
def test_prompts_by_hand(tokens: int, offsets: tuple[int, ...]) -> None:
    """L = tokens - 500; at L // 10, L // 2 and 8 * L // 10."""
    found = prompts(tokens)
    assert found.offsets == offsets
    assert not found.skipped
    assert found.ids.shape == (3, 400)
    assert found.ids[:, 0].tolist() == list(offsets)
    assert found.ids[:, -1].tolist() == [o + 399 for o in offsets]


@pytest.mark.parametrize("tokens", [0, 400, 899])
def test_a_short_text_skips_the_gate_and_says_so(tokens: int) -> None:
    found = prompts(tokens)
    assert (len(found.ids), found.offsets) == (0, ())
    assert str(tokens) in found.skipped
    assert "900" in found.skipped


def test_a_window_that_holds_the_prompt_skips_the_gate() -> None:
    """w + sink + 8 < 400, or the served kernel would never start."""
    assert not prompts(w=389, sink=2).skipped
    assert "exact" in prompts(w=390, sink=2).skipped
    assert "exact" in prompts(w=389, sink=3).skipped


def test_the_gate_can_be_switched_off() -> None:
    assert "--no-gate" in prompts(enabled=False).skipped


def moved(replica: Replica) -> None:
    flat = replica.masters.flat
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)


@pytest.fixture(scope="module")
def network() -> Replica:
    return Tiny(layers=2, seed=3).replica(SETTING)


def test_the_baseline_stays_and_the_candidate_changes(network: Replica) -> None:
    val = np.random.default_rng(0).integers(0, 29, 1000)
    config = GateConfig(threshold=1.0, slack=0.0)
    chosen = gate.select_prompts(config, val, SETTING)
    judged = gate.run(config, chosen, network)
    assert judged is not None
    start = judged.start
    assert start.passed
    assert judged.judge(network) == start

    frozen = network.masters.flat.clone()
    moved(network)
    try:
        rows = greedy(network, torch.from_numpy(chosen.ids), 60, (), student=True, served=True)
        after = judged.judge(network)
        assert after.scores == tuple(loop_score(row) for row in rows)
        assert after.scores != start.scores
        assert after.passed == all(s <= b for s, b in zip(after.scores, start.scores, strict=True))
        assert judged.start == start
    finally:
        network.masters.flat.copy_(frozen)


def test_texts_come_from_the_served_kernel_and_end_at_eos(monkeypatch: pytest.MonkeyPatch, network: Replica) -> None:
    calls: list[tuple[int, int, tuple[int, ...], bool, bool]] = []

    def spy(
        replica: Replica, ids: torch.Tensor, count: int, eos: tuple[int, ...], *, student: bool, served: bool
    ) -> list[list[int]]:
        calls.append((ids.shape[1], count, eos, student, served))
        return [[5] * 60, [1, 2, 3], list(range(60))]

    monkeypatch.setattr(gate, "greedy", spy)
    val = np.random.default_rng(0).integers(0, 29, 1000)
    judged = gate.run(GateConfig(), gate.select_prompts(GateConfig(), val, SETTING), network)
    assert judged is not None
    assert judged.start.scores == (1 - 1 / 57, 0.0, 0.0)
    assert not judged.start.passed  # a baseline over the threshold does not pass either
    eos = network.weights.plan.eos_ids
    assert calls == [(400, 60, eos, True, True), (400, 60, eos, False, False)]  # the baseline, then the teacher


def test_a_skipped_gate_is_no_gate(network: Replica) -> None:
    assert gate.run(GateConfig(), prompts(100), network) is None
