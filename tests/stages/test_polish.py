"""The training loop: which checkpoint is kept, when it evaluates, and what a gradient that is not finite may do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.events import EvalEvent, Event, GateEvent, StepEvent, WarningEvent, ignore
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.elements import StepLoss
from cortiq_fcd.model.optimizer import Optimizer
from cortiq_fcd.model.perplexity import window_perplexity
from cortiq_fcd.model.replica import Replica, loss_and_gradient
from cortiq_fcd.model.windows import SplitMix64, training_offsets
from cortiq_fcd.stages import polish
from cortiq_fcd.stages.artefacts import Gate, Judgement, Step, Trained
from cortiq_fcd.stages.config import TrainConfig
from tests.fixtures import Tiny

MODEL = Tiny(layers=2)
SETTING = Conversion((0, 1), "all", m=6, w=5, sink=2, seal=20)
CONFIG = TrainConfig(steps=6, lr=1e-2, kl=0.7, eval_every=2, batch=2, seq=40, seed=3)
TRAIN = np.random.default_rng(0).integers(0, MODEL.V, 600)
VAL = np.random.default_rng(1).integers(0, MODEL.V, 400)
THRESHOLD, SLACK = 0.35, 0.10


def network() -> Replica:
    return MODEL.replica(SETTING)


# Selection


def simulated(
    ppls: list[float], scores: list[tuple[float, ...]] | None, *, every: bool
) -> tuple[Trained, float, list[Event]]:
    """The loop over given perplexities and loop scores of steps 0, 1, ..; also the step whose masters it ends with."""
    replica, now, events = NETWORK, [0], []
    replica.masters.flat.fill_(0)

    def train_step(
        config: TrainConfig, replica: Replica, optimizer: Any, train: Any, offsets: Any, number: int, elements: Any
    ) -> Step:
        now[0] = number
        replica.masters.flat.fill_(number)
        return Step(number, 1.0, 0.1, 1.0, 0.0, tuple(offsets))

    def verdict(step: int) -> Judgement:
        pairs = zip(scores[step], scores[0], strict=True)
        return Judgement(scores[step], all(s <= THRESHOLD and s <= base + SLACK for s, base in pairs))

    gate = None if scores is None else Gate(lambda candidate: verdict(now[0]), verdict(0), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polish, "train_step", train_step)
        patch.setattr(polish, "window_perplexity", lambda *args, student: ppls[now[0]] if student else 1.5)
        patch.setattr(polish, "reset_masters", lambda replica: replica.masters.flat.fill_(0))
        config = CONFIG.model_copy(update={"steps": len(ppls) - 1, "eval_every": 1})
        trained = polish.run(config, replica, TRAIN, VAL, gate, events.append, judge_every_checkpoint=every)
    return trained, float(replica.masters.flat.unique()), events


NETWORK = network()
PPLS = st.lists(st.sampled_from([7.0, 8.0, 9.0, 9.5, 10.0, math.inf]), min_size=2, max_size=9)
SCORES = st.tuples(*[st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.35, 0.36, 0.5]) for _ in range(3)])


@given(ppls=PPLS, data=st.data())
def test_the_result_is_that_of_judging_every_checkpoint(ppls: list[float], data: st.DataObject) -> None:
    scores = data.draw(st.lists(SCORES, min_size=len(ppls), max_size=len(ppls)))
    passing = [
        step
        for step, ppl in enumerate(ppls)
        if all(s <= THRESHOLD and s <= b + SLACK for s, b in zip(scores[step], scores[0], strict=True))
        and ppl < math.inf
    ]
    best = min(passing, key=lambda step: (ppls[step], step), default=0)
    eager, eager_masters, _ = simulated(ppls, scores, every=True)
    lazy, lazy_masters, _ = simulated(ppls, scores, every=False)
    for trained, masters in ((eager, eager_masters), (lazy, lazy_masters)):
        assert trained.best_step == masters == best
        assert trained.best_ppl == ppls[best]
        assert trained.passed == bool(passing)
        assert [e.ppl for e in trained.evaluations] == ppls
    assert all(e.judgement is not None for e in eager.evaluations)
    # What the lazy loop did judge it judged alike.
    for a, b in zip(lazy.evaluations, eager.evaluations, strict=True):
        assert a.judgement is None or a.judgement == b.judgement


@given(ppls=PPLS)
def test_without_the_gate_perplexity_chooses(ppls: list[float]) -> None:
    trained, masters, _ = simulated(ppls, None, every=False)
    assert trained.best_step == masters == ppls.index(min(ppls))


GOOD, LOOPS = (0.1, 0.1, 0.1), (0.1, 0.36, 0.1)


@pytest.mark.parametrize(
    ("ppls", "scores", "best", "passed"),
    [
        ([10, 9, 8], [GOOD, GOOD, GOOD], 2, True),
        ([10, 8, 8], [GOOD, GOOD, GOOD], 1, True),  # ties to the earliest
        ([8, 8, 9], [GOOD, GOOD, GOOD], 0, True),  # step 0 competes
        ([8, 9, 8.5], [LOOPS, GOOD, GOOD], 2, True),  # but not with a loop of its own
        ([10, 9, 8], [LOOPS, LOOPS, LOOPS], 0, False),  # nothing passes: identity
        ([10, 9, 8], [GOOD, GOOD, LOOPS], 1, True),  # the gate overrules the best perplexity
        ([10, 8, 9, 8.5], [GOOD, LOOPS, GOOD, GOOD], 3, True),
        ([10, 9], [(0.1,) * 3, (0.2,) * 3], 1, True),  # exactly the slack more
        ([10, 9], [(0.1,) * 3, (0.1, 0.2001, 0.1)], 0, True),
        ([10, 9], [(0.3,) * 3, (0.35,) * 3], 1, True),  # exactly the threshold
        ([math.inf, 9], [GOOD, GOOD], 1, True),
    ],
)
def test_selection_by_example(ppls: list[float], scores: list[tuple[float, ...]], best: int, passed: bool) -> None:
    trained, masters, _ = simulated(ppls, scores, every=False)
    assert (trained.best_step, masters, trained.passed) == (best, best, passed)
    assert trained.evaluations[0].judgement is not None  # the baseline is always told


def test_events_say_which_checkpoint_would_be_written() -> None:
    _, _, events = simulated([10, 9, 9.5, 8], [LOOPS, GOOD, GOOD, LOOPS], every=False)
    evals = [(e.step, e.ppl, e.best_step, e.best_ppl) for e in events if isinstance(e, EvalEvent)]
    assert evals == [(0, 10, None, None), (1, 9, 1, 9), (2, 9.5, 1, 9), (3, 8, 1, 9)]
    assert [(e.step, tuple(e.scores), e.passed) for e in events if isinstance(e, GateEvent)] == [
        (0, LOOPS, False),
        (1, GOOD, True),
        (3, LOOPS, False),  # step 2 could not win and was not decoded
    ]
    assert {(e.teacher_ppl, e.start_ppl) for e in events if isinstance(e, EvalEvent)} == {(1.5, 10)}


# Schedule


@pytest.mark.parametrize(
    ("steps", "every", "evaluated"),
    [(10, 4, [0, 4, 8, 10]), (10, 5, [0, 5, 10]), (3, 25, [0, 3]), (3, 0, [0, 3]), (2, 1, [0, 1, 2]), (1, 1, [0, 1])],
)
def test_when_it_evaluates(steps: int, every: int, evaluated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "window_perplexity", lambda *args, student: 5.0)
    monkeypatch.setattr(polish, "train_step", lambda *args: Step(args[-2], 1.0, 0.1, 1.0, 0.0, tuple(args[-3])))
    config = CONFIG.model_copy(update={"steps": steps, "eval_every": every})
    trained = polish.run(config, network(), TRAIN, VAL, None, ignore)
    assert [e.step for e in trained.evaluations] == evaluated
    assert [s.step for s in trained.steps] == list(range(1, steps + 1))


def test_windows_come_from_the_seed_alone() -> None:
    trained = polish.run(CONFIG, network(), TRAIN, VAL, None, ignore)
    generator = SplitMix64(3)
    want = [tuple(training_offsets(generator, 600, 40, 2)) for _ in range(6)]
    assert [step.offsets for step in trained.steps] == want


def test_a_run_learns_and_its_figures_are_those_of_its_masters() -> None:
    replica = network()
    start = window_perplexity(replica, VAL, 40, 2, 2, student=True)
    events: list[Event] = []
    trained = polish.run(CONFIG, replica, TRAIN, TRAIN[:400], None, events.append)
    assert trained.best_step > 0
    assert trained.best_ppl == window_perplexity(replica, TRAIN[:400], 40, 2, 2, student=True)
    assert trained.best_ppl < trained.start_ppl
    assert trained.teacher_ppl == window_perplexity(replica, TRAIN[:400], 40, 2, 2, student=False)
    assert start != trained.start_ppl  # other text
    steps = [e for e in events if isinstance(e, StepEvent)]
    assert [(e.step, e.ce, e.kl, e.grad_norm) for e in steps] == [
        (s.step, s.ce, s.kl, s.grad_norm) for s in trained.steps
    ]
    assert {(e.steps, e.tokens) for e in steps} == {(6, 80)}


def test_two_runs_are_bit_identical() -> None:
    first, second = network(), network()
    runs = [polish.run(CONFIG, replica, TRAIN, VAL, None, ignore) for replica in (first, second)]
    assert torch.equal(first.masters.flat, second.masters.flat)
    assert [replace(s, seconds=0) for s in runs[0].steps] == [replace(s, seconds=0) for s in runs[1].steps]


# Gradients that are not finite


def broken_at(steps: set[int], value: float = math.nan) -> Callable[..., StepLoss]:
    """`loss_and_gradient`, with one entry of the gradient replaced in these calls (counted from 1)."""
    calls = [0]

    def loss(replica: Replica, *args: Any) -> StepLoss:
        result = loss_and_gradient(replica, *args)
        calls[0] += 1
        if calls[0] in steps:
            replica.gradient.flat[calls[0]] = value
        return result

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_leaves_masters_and_moments_bit_identical(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = network()
    optimizer = Optimizer(replica)
    polish.train_step(CONFIG, replica, optimizer, TRAIN, [5, 80], 1)
    before = [t.clone() for t in (replica.masters.flat, optimizer.moments.first, optimizer.moments.second)]
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({1}, value))
    step = polish.train_step(CONFIG, replica, optimizer, TRAIN, [9, 90], 2)
    assert step.skipped
    assert not math.isfinite(step.grad_norm)
    after = (replica.masters.flat, optimizer.moments.first, optimizer.moments.second)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.moments.steps == 1
    assert not polish.train_step(CONFIG, replica, optimizer, TRAIN, [9, 90], 3).skipped
    assert optimizer.moments.steps == 2


def test_masters_that_overflow_give_a_skipped_step() -> None:
    """The real thing: no patched gradient."""
    replica = network()
    optimizer = Optimizer(replica)
    replica.masters.layers[0].down.fill_(3e38)
    before = replica.masters.flat.clone()
    assert polish.train_step(CONFIG, replica, optimizer, TRAIN, [5, 80], 1).skipped
    assert torch.equal(replica.masters.flat, before)
    moments = optimizer.moments
    assert (moments.steps, moments.first.abs().max(), moments.second.abs().max()) == (0, 0, 0)


def test_a_skipped_step_uses_up_its_windows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = network()
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({3}))
    events: list[Event] = []
    config = CONFIG.model_copy(update={"eval_every": 1})
    trained = polish.run(config, replica, TRAIN, VAL, None, events.append)
    assert [s.step for s in trained.steps if s.skipped] == [3]
    assert not trained.diverged
    assert [e.message for e in events if isinstance(e, WarningEvent)] == [
        "step 3: the gradient is not finite, the step was skipped"
    ]
    assert [e.step for e in events if isinstance(e, StepEvent)] == [1, 2, 4, 5, 6]
    assert trained.evaluations[3].ppl == trained.evaluations[2].ppl

    other = network()
    optimizer = Optimizer(other)
    for step in trained.steps:
        if step.step != 3:
            polish.train_step(CONFIG, other, optimizer, TRAIN, list(step.offsets), step.step)
    last = window_perplexity(other, VAL, 40, 2, 2, student=True)
    assert trained.evaluations[-1].ppl == last


@pytest.mark.parametrize(
    ("bad", "steps_run", "diverged"),
    [
        ({1, 2, 3, 4, 5}, 5, True),
        ({3, 4, 5, 6, 7}, 7, True),
        ({1, 2, 3, 4, 6, 7, 8, 9}, 12, False),  # never five in a row
        ({8, 9, 10, 11, 12}, 12, True),
        ({9, 10, 11, 12}, 12, False),
    ],
)
def test_five_in_a_row_end_the_run(
    bad: set[int], steps_run: int, diverged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = network()
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at(bad))
    config = CONFIG.model_copy(update={"steps": 12, "eval_every": 1})
    trained = polish.run(config, replica, TRAIN, TRAIN[:400], None, ignore)
    assert len(trained.steps) == steps_run
    assert trained.diverged is diverged
    # The best state so far is kept.
    ppls = {e.step: e.ppl for e in trained.evaluations}
    assert trained.best_step == min(ppls, key=lambda step: (ppls[step], step))
    assert window_perplexity(replica, TRAIN[:400], 40, 2, 2, student=True) == trained.best_ppl


def test_moments_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Optimizer] = []

    def making(*args: Any) -> Optimizer:
        made.append(Optimizer(*args))
        return made[-1]

    monkeypatch.setattr(polish, "Optimizer", making)
    polish.run(CONFIG, network(), TRAIN, VAL, None, ignore)
    assert [optimizer.moments.steps for optimizer in made] == [CONFIG.steps]


# Losses and validations that are not finite


def losing(loss: StepLoss) -> Callable[..., StepLoss]:
    """`loss_and_gradient`, telling another loss."""

    def told(replica: Replica, *args: Any) -> StepLoss:
        loss_and_gradient(replica, *args)
        return loss

    return told


@pytest.mark.parametrize(("ce", "kl"), [(math.nan, 0.1), (2.0, math.inf)])
def test_a_loss_that_is_not_finite_skips_the_step(ce: float, kl: float, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = network()
    optimizer = Optimizer(replica)
    before = replica.masters.flat.clone()
    monkeypatch.setattr(polish, "loss_and_gradient", losing(StepLoss(ce, kl, 0.0, 0)))
    step = polish.train_step(CONFIG, replica, optimizer, TRAIN, [5, 80], 1)
    assert (step.skipped, step.why) == (True, "the loss is not finite")
    assert torch.equal(replica.masters.flat, before)
    assert optimizer.moments.steps == 0


def test_a_gradient_that_vanished_in_an_overflow_skips_the_step() -> None:
    """Masters so large that a norm's sum of squares is infinite: the rows become 0, and so does the gradient."""
    replica = network()
    optimizer = Optimizer(replica)
    replica.masters.flat.fill_(1e30)
    step = polish.train_step(CONFIG, replica, optimizer, TRAIN, [5, 80], 1)
    assert step.skipped
    assert optimizer.moments.steps == 0


def test_nothing_left_to_learn_is_no_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL alone with a student that is the teacher: gradient and loss are 0."""
    replica = network()
    monkeypatch.setattr(polish, "loss_and_gradient", losing(StepLoss(3.0, 0.0, 0.0, 0)))
    monkeypatch.setattr(Optimizer, "gradient_norm", lambda optimizer: 0.0)
    config = CONFIG.model_copy(update={"kl": 1.0})
    assert not polish.train_step(config, replica, Optimizer(replica), TRAIN, [5, 80], 1).skipped
    step = polish.train_step(CONFIG, replica, Optimizer(replica), TRAIN, [5, 80], 1)
    assert step.why == "the gradient is exactly 0 at a loss of 0.9 nats"


def test_a_validation_that_is_not_finite_is_told_and_never_chosen() -> None:
    trained, masters, events = simulated([10, math.nan, 9.5, math.inf], None, every=False)
    assert (trained.best_step, masters) == (2, 2)
    told = [e.message for e in events if isinstance(e, WarningEvent)]
    assert told == [f"step {step}: the validation perplexity is not finite" for step in (1, 3)]


def test_masters_that_are_not_finite_are_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """However good the perplexity is: a file never gets NaN or Inf."""
    replica = network()

    def train_step(
        config: Any, replica: Replica, optimizer: Any, train: Any, offsets: Any, number: int, elements: Any
    ) -> Step:
        replica.masters.flat[7] = math.inf if number == 2 else 1.0
        return Step(number, 1.0, 0.1, 1.0, 0.0, tuple(offsets))

    ppls = iter([10.0, 1.5, 9.0, 5.0, 8.0])  # step 0, the teacher, steps 1 to 3
    monkeypatch.setattr(polish, "train_step", train_step)
    monkeypatch.setattr(polish, "window_perplexity", lambda *args, student: next(ppls))
    config = CONFIG.model_copy(update={"steps": 3, "eval_every": 1})
    assert polish.run(config, replica, TRAIN, VAL, None, ignore).best_step == 3
