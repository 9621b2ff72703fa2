"""Stage 3: the training loop, and which checkpoint it keeps.

A checkpoint is worth judging only if its validation perplexity is below that of every checkpoint that has passed so far
(ties go to the earliest). So one best state is kept, and the result is that of judging all of them. Step 0, the
conversion as it is, competes like any other.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cortiq_fcd.events import EvalEvent, GateEvent, Listener, StepEvent, WarningEvent
from cortiq_fcd.io.tensor_file import StoredVector
from cortiq_fcd.model.adamw import SLICE
from cortiq_fcd.model.average import Average
from cortiq_fcd.model.conversion import seal_choices
from cortiq_fcd.model.elements import CERTIFIED, Elements
from cortiq_fcd.model.layer_clip import clip_layers
from cortiq_fcd.model.norm_rate import norm_steps
from cortiq_fcd.model.optimizer import AnyOptimizer, Optimizer, ShardedOptimizer
from cortiq_fcd.model.perplexity import window_perplexity
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import Replica, loss_and_gradient, reset_masters
from cortiq_fcd.model.stored_moments import StoredMoments, zeros
from cortiq_fcd.model.vectors import read_vector
from cortiq_fcd.model.windows import QUICK_ROUNDS, Ids, SplitMix64, offsets_once, training_offsets, windows
from cortiq_fcd.stages.artefacts import (
    Evaluation,
    Gate,
    Judgement,
    Keeper,
    Step,
    Trained,
    TrainingRecord,
    TrainingState,
)
from cortiq_fcd.stages.best import Best, BestInMemory
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.schedule import rate

# So many unusable steps in a row end the run.
MAX_SKIPPED_IN_A_ROW = 5
# Nats. A gradient of exactly 0 at a larger loss did not vanish because nothing is left to learn: something overflowed.
VANISHED_ABOVE = 1e-3


def run(
    config: TrainConfig,
    replica: Replica,
    train: Ids,
    val: Ids,
    gate: Gate | None,
    listener: Listener,
    *,
    judge_every_checkpoint: bool = False,
    keeper: Keeper | None = None,
    resumed: TrainingState | None = None,
    ranks: Ranks = ALONE,
    shard_optimizer: bool = False,
    best: Best | None = None,
    moments_file: Path | None = None,
) -> Trained:
    """Train the replica's masters; they end as the best state. `gate` null: perplexity alone chooses.

    `resumed`: go on from there, as if there had been no break. `ranks`: the windows of a step, and of validations, are
    divided among them; `shard_optimizer`: masters and moments too. `best`: where the best state is kept, by default in
    memory; `moments_file`: where the moments of the optimizer are, null: in memory. Errors of the keeper come through.
    """
    optimizer: AnyOptimizer
    if shard_optimizer:
        optimizer = ShardedOptimizer(replica, ranks)
    else:
        optimizer = Optimizer(replica, ranks, _stored_moments(replica, resumed, moments_file))
    loop = _Loop(config, replica, optimizer, val, gate, listener, judge_every_checkpoint, best or BestInMemory())
    generator = SplitMix64(config.seed)
    if resumed is None:
        loop.evaluate(0)
    else:
        loop.resume(resumed)
        generator.state = resumed.record.generator
    for number in range(len(loop.steps) + 1, config.steps + 1):
        offsets = _offsets(config, generator, len(train), number)
        elements = _elements(config, generator, replica)
        loop.record(train_step(config, replica, optimizer, train, offsets, number, elements))
        if loop.diverged:
            break
        evaluated = number == config.steps or (config.eval_every > 0 and number % config.eval_every == 0)
        if evaluated:
            loop.evaluate(number)
        if keeper is not None and keeper.wants(evaluated=evaluated):
            with replica.clock("checkpoint"):
                keeper.keep(loop.state(generator))
    return loop.finish()


def _offsets(config: TrainConfig, generator: SplitMix64, tokens: int, number: int) -> list[int]:
    """Where the windows of a step begin."""
    if config.sampling == "once":
        return offsets_once(config.seed, (number - 1) * config.batch, tokens, config.seq, config.batch)
    return training_offsets(generator, tokens, config.seq, config.batch)


def _elements(config: TrainConfig, generator: SplitMix64, replica: Replica) -> Elements:
    """What the recipe adds to a step; a seal that varies is drawn here."""
    seal = None
    if config.seals == "varied" and (choices := seal_choices(replica.conversion, config.seq)):
        seal = choices[generator.next_u64() % len(choices)]
    gain_limit = math.inf if config.gain_limit is None else config.gain_limit
    return Elements(config.temperature, config.match, gain_limit, seal)


def _stored_moments(replica: Replica, resumed: TrainingState | None, file: Path | None) -> StoredMoments | None:
    if file is None:
        return None
    if resumed is None:
        count = len(replica.masters.flat)
        return StoredMoments(file, zeros(count), zeros(count))
    assert isinstance(resumed.first, StoredVector)
    assert isinstance(resumed.second, StoredVector)
    return StoredMoments(file, resumed.first, resumed.second, resumed.record.updates)


def train_step(
    config: TrainConfig,
    replica: Replica,
    optimizer: AnyOptimizer,
    train: Ids,
    offsets: list[int],
    number: int,
    elements: Elements = CERTIFIED,
) -> Step:
    """One step over the windows at `offsets`, of which this rank takes its share. An unusable gradient or loss leaves
    masters and moments untouched.
    """
    began = time.perf_counter()
    clock, ranks = replica.clock, optimizer.ranks
    with clock("sampling"):
        ids, targets = windows(train, list(share(ranks, offsets)), config.seq, replica.weights.embed.device)
    loss = loss_and_gradient(replica, ids, targets, config.kl, optimizer.layer_done, elements)
    with clock("optimizer"):
        norm = optimizer.gradient_norm()
        ce, kl, match, wild = ranks.sum([loss.ce, loss.kl, loss.match, loss.wild_rows])
        ce, kl, match = (total / ranks.world for total in (ce, kl, match))  # every rank has as many positions
        why = _flaw(config, ce, kl, norm)
        if why:
            optimizer.skip()
        else:
            clipped = clip_layers(replica) if config.clip == "layer" else norm
            with norm_steps(replica, config.norm_lr):
                optimizer.step(rate(config, number), clipped)
    seconds = time.perf_counter() - began
    return Step(number, ce, kl, norm, seconds, tuple(offsets), bool(why), why, match, int(wild))


def _flaw(config: TrainConfig, ce: float, kl: float, norm: float) -> str:
    """Why a step can't be used; empty if it can."""
    if not math.isfinite(norm):
        return "the gradient is not finite"
    total = config.kl * kl + (1 - config.kl) * ce
    if not math.isfinite(total):
        return "the loss is not finite"
    if norm == 0 and total > VANISHED_ABOVE:
        return f"the gradient is exactly 0 at a loss of {total:.3g} nats"
    return ""


@dataclass
class _Loop:
    """What the loop remembers besides masters and moments."""

    config: TrainConfig
    replica: Replica
    optimizer: AnyOptimizer
    val: Ids
    gate: Gate | None
    listener: Listener
    judge_every_checkpoint: bool
    best_state: Best
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    teacher_ppl: float = math.nan
    best: Evaluation | None = None
    gate_seconds: float = 0.0
    average: Average | None = None

    def __post_init__(self) -> None:
        if self.config.ema:
            self.average = Average(self.replica.masters.flat, self.config.ema)

    def record(self, step: Step) -> None:
        self.steps.append(step)
        if step.skipped:
            self._warn_skipped(step)
            return
        if self.average is not None:
            self.average.add()
        self.listener(
            StepEvent(
                step=step.step,
                steps=self.config.steps,
                ce=step.ce,
                kl=step.kl,
                grad_norm=step.grad_norm,
                seconds=step.seconds,
                tokens=self.config.batch * self.config.seq,
            )
        )

    def evaluate(self, step: int) -> None:
        """Validate the present masters, or their average where that is better; keep them if they are the best that
        passes.
        """
        perplexity = self._perplexity(student=True)
        averaged = False
        if step and self.average is not None:
            self.average.swap()
            of_average = self._perplexity(student=True)
            averaged = of_average < perplexity
            if averaged:
                perplexity = of_average
            else:
                self.average.swap()
        self._consider(step, perplexity, averaged=averaged)
        if averaged and self.average is not None:
            self.average.swap()

    def _consider(self, step: int, perplexity: float, *, averaged: bool) -> None:
        """Judge what stands in the masters' place, and keep it if it is the best that passes."""
        if step == 0:
            self.teacher_ppl = self._perplexity(student=False)
        if not math.isfinite(perplexity):
            self.listener(WarningEvent(message=f"step {step}: the validation perplexity is not finite"))
        can_win = perplexity < (self.best.ppl if self.best else math.inf) and self._can_be_written()
        judgement = self._judge(step) if can_win or step == 0 or self.judge_every_checkpoint else None
        evaluation = Evaluation(step, perplexity, judgement, averaged)
        self.evaluations.append(evaluation)
        if can_win and (self.gate is None or (judgement is not None and judgement.passed)):
            self.best = evaluation
            self.best_state.keep(self.optimizer.masters if step else None, step)
        self.listener(
            EvalEvent(
                step=step,
                ppl=perplexity,
                teacher_ppl=self.teacher_ppl,
                start_ppl=self.evaluations[0].ppl,
                best_step=self.best.step if self.best else None,
                best_ppl=self.best.ppl if self.best else None,
            )
        )

    @property
    def diverged(self) -> bool:
        """Whether the last steps could not be used."""
        last = self.steps[-MAX_SKIPPED_IN_A_ROW:]
        return len(last) == MAX_SKIPPED_IN_A_ROW and all(step.skipped for step in last)

    def state(self, generator: SplitMix64) -> TrainingState:
        """The present state; its tensors are the ones at work, not copies."""
        optimizer, best = self.optimizer, self.best_state.vector
        moments = optimizer.moments
        record = TrainingRecord(
            step=len(self.steps),
            generator=generator.state,
            updates=moments.steps,
            teacher_ppl=self.teacher_ppl,
            best=self.best,
            evaluations=tuple(self.evaluations),
            steps=tuple(self.steps),
        )
        saved = optimizer.saved
        at_work = saved(optimizer.masters), saved(moments.first), saved(moments.second)
        average = self.average.mean if self.average else None
        return TrainingState(record, *at_work, None if best is None else saved(best), average)

    def resume(self, state: TrainingState) -> None:
        """Take over a saved state. Warnings are given again: they belong to this run's report."""
        record = state.record
        self.teacher_ppl, self.best = record.teacher_ppl, record.best
        self.steps, self.evaluations = list(record.steps), list(record.evaluations)
        best = None if state.best is None else self.optimizer.received(state.best)
        self.best_state.keep(best, record.best.step if record.best else 0)
        self.optimizer.resume(state.masters, state.first, state.second, record.updates)
        if state.average is not None:
            mean = read_vector(self.optimizer.received(state.average))
            self.average = Average(self.replica.masters.flat, self.config.ema, mean, record.updates)
        for step in self.steps:
            if step.skipped:
                self._warn_skipped(step)

    def finish(self) -> Trained:
        """Put the best state into the masters."""
        start = self.evaluations[0]
        best = self.best or start
        vector = self.best_state.vector
        if vector is None:
            reset_masters(self.replica)
        else:
            self.optimizer.restore(vector)
        return Trained(
            best_step=best.step,
            best_ppl=best.ppl,
            teacher_ppl=self.teacher_ppl,
            evaluations=tuple(self.evaluations),
            steps=tuple(self.steps),
            passed=self.best is not None,
            diverged=self.diverged,
            gate_seconds=self.gate_seconds,
            averaged=best.averaged,
        )

    def _warn_skipped(self, step: Step) -> None:
        self.listener(WarningEvent(message=f"step {step.step}: {step.why}, the step was skipped"))

    def _can_be_written(self) -> bool:
        """A file never gets NaN or Inf. A sum is not finite as soon as one element is not."""
        slices = torch.split(self.replica.masters.flat, SLICE)  # each is widened to f64 to be summed
        return math.isfinite(sum(part.sum(dtype=torch.float64).item() for part in slices))

    def _perplexity(self, *, student: bool) -> float:
        config, ranks = self.config, self.optimizer.ranks
        rounds = QUICK_ROUNDS
        with self.replica.clock("validation"):
            return window_perplexity(self.replica, self.val, config.seq, config.batch, rounds, ranks, student=student)

    def _judge(self, step: int) -> Judgement | None:
        if self.gate is None:
            return None
        began = time.perf_counter()
        judgement = self.gate.judge(self.replica) if step else self.gate.start
        self.gate_seconds += time.perf_counter() - began
        scores, caught = list(judgement.scores), judgement.tight_loops
        self.listener(GateEvent(step=step, scores=scores, passed=judgement.passed, tight_loops=caught))
        return judgement
