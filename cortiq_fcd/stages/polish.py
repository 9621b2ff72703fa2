"""Stage 3: the training loop, and which checkpoint it keeps.

A checkpoint is worth judging only if its validation perplexity is below that of every checkpoint that has passed so far
(ties go to the earliest). So one best state is kept, and the result is that of judging all of them. Step 0, the
conversion as it is, competes like any other.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from torch import Tensor

from cortiq_fcd.events import EvalEvent, GateEvent, Listener, StepEvent, WarningEvent
from cortiq_fcd.model.adamw import Moments, adamw_step, gradient_norm, new_moments
from cortiq_fcd.model.perplexity import window_perplexity
from cortiq_fcd.model.replica import Replica, loss_and_gradient, reset_masters
from cortiq_fcd.model.windows import QUICK_ROUNDS, Ids, SplitMix64, training_offsets, windows
from cortiq_fcd.stages.artefacts import Evaluation, Gate, Judgement, Step, Trained
from cortiq_fcd.stages.config import TrainConfig

# So many steps in a row without a finite gradient end the run.
MAX_SKIPPED_IN_A_ROW = 5


def run(
    config: TrainConfig,
    replica: Replica,
    train: Ids,
    val: Ids,
    gate: Gate | None,
    listener: Listener,
    *,
    judge_every_checkpoint: bool = False,
) -> Trained:
    """Train the replica's masters; they end as the best state. `gate` null: perplexity alone chooses."""
    loop = _Loop(config, replica, val, gate, listener, judge_every_checkpoint)
    loop.evaluate(0)
    generator = SplitMix64(config.seed)
    moments = new_moments(replica.masters.flat)
    skipped_in_a_row = 0
    for number in range(1, config.steps + 1):
        offsets = training_offsets(generator, len(train), config.seq, config.batch)
        step = train_step(config, replica, moments, train, offsets, number)
        loop.record(step)
        skipped_in_a_row = skipped_in_a_row + 1 if step.skipped else 0
        if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            break
        if number == config.steps or (config.eval_every and number % config.eval_every == 0):
            loop.evaluate(number)
    return loop.finish(diverged=skipped_in_a_row == MAX_SKIPPED_IN_A_ROW)


def train_step(
    config: TrainConfig, replica: Replica, moments: Moments, train: Ids, offsets: list[int], number: int
) -> Step:
    """One step over the windows at `offsets`. Without a finite gradient the masters and moments stay untouched."""
    began = time.perf_counter()
    ids, targets = windows(train, offsets, config.seq, replica.weights.embed.device)
    loss = loss_and_gradient(replica, ids, targets, config.kl)
    norm = gradient_norm(replica.gradient.flat)
    skipped = not math.isfinite(norm)
    if not skipped:
        adamw_step(replica.masters.flat, replica.gradient.flat, moments, config.lr, norm)
    return Step(number, loss.ce, loss.kl, norm, time.perf_counter() - began, tuple(offsets), skipped)


@dataclass
class _Loop:
    """What the loop remembers besides masters and moments."""

    config: TrainConfig
    replica: Replica
    val: Ids
    gate: Gate | None
    listener: Listener
    judge_every_checkpoint: bool
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    teacher_ppl: float = math.nan
    best: Evaluation | None = None
    best_state: Tensor | None = None
    gate_seconds: float = 0.0

    def record(self, step: Step) -> None:
        self.steps.append(step)
        if step.skipped:
            self.listener(WarningEvent(message=f"step {step.step}: the gradient is not finite, the step was skipped"))
            return
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
        """Validate the present masters; keep them if they are the best that passes."""
        perplexity = self._perplexity(student=True)
        if step == 0:
            self.teacher_ppl = self._perplexity(student=False)
        can_win = perplexity < (self.best.ppl if self.best else math.inf)
        judgement = self._judge(step) if can_win or step == 0 or self.judge_every_checkpoint else None
        evaluation = Evaluation(step, perplexity, judgement)
        self.evaluations.append(evaluation)
        if can_win and (self.gate is None or (judgement is not None and judgement.passed)):
            self.best = evaluation
            self.best_state = self.replica.masters.flat.clone() if step else None
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

    def finish(self, *, diverged: bool) -> Trained:
        """Put the best state into the masters."""
        start = self.evaluations[0]
        best = self.best or start
        if self.best_state is None:
            reset_masters(self.replica)
        else:
            self.replica.masters.flat.copy_(self.best_state)
        return Trained(
            best_step=best.step,
            best_ppl=best.ppl,
            teacher_ppl=self.teacher_ppl,
            evaluations=tuple(self.evaluations),
            steps=tuple(self.steps),
            passed=self.best is not None,
            diverged=diverged,
            gate_seconds=self.gate_seconds,
        )

    def _perplexity(self, *, student: bool) -> float:
        config = self.config
        return window_perplexity(self.replica, self.val, config.seq, config.batch, QUICK_ROUNDS, student=student)

    def _judge(self, step: int) -> Judgement | None:
        if self.gate is None:
            return None
        began = time.perf_counter()
        judgement = self.gate.judge(self.replica) if step else self.gate.start
        self.gate_seconds += time.perf_counter() - began
        self.listener(GateEvent(step=step, scores=list(judgement.scores), passed=judgement.passed))
        return judgement
