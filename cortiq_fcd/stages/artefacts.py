"""What passes from stage to stage: frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from cortiq_fcd.io.layout import DType
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.vectors import Vector


@dataclass(frozen=True)
class Judgement:
    """The gate's verdict over one checkpoint: the loop score of each prompt, 0 to 1, and the ids it is the score of.

    `tight_loops`: texts that failed for ending in one, whatever their score.
    """

    scores: tuple[float, ...]
    passed: bool
    continuations: tuple[tuple[int, ...], ...] = ()
    tight_loops: int = 0


Judge = Callable[[Replica], Judgement]
"""Judges the replica's present masters through the served kernel."""


@dataclass(frozen=True)
class Gate:
    """How checkpoints are judged, the verdict over step 0 (the conversion as it is: every score's baseline), and the
    one over the teacher's exact attention on the same prompts.
    """

    judge: Judge
    start: Judgement
    exact: Judgement


@dataclass(frozen=True)
class Step:
    """One optimizer step; ce and kl are means over its positions, unweighted, in nats; match and wild_rows as in
    `StepLoss`.

    `skipped`: gradient or loss were not usable (`why` says how), nothing was changed.
    """

    step: int
    ce: float
    kl: float
    grad_norm: float
    seconds: float
    offsets: tuple[int, ...]
    skipped: bool = False
    why: str = ""
    match: float = 0.0
    wild_rows: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's quick-window perplexity, and the gate's verdict where it was asked. Step 0 is the conversion.

    `averaged`: of the average of the weights, which was better than they were.
    """

    step: int
    ppl: float
    judgement: Judgement | None = None
    averaged: bool = False


@dataclass(frozen=True)
class Trained:
    """What the polish loop found. The replica's masters hold the weights of `best_step` (0: the frozen ones)."""

    best_step: int
    best_ppl: float
    teacher_ppl: float
    evaluations: tuple[Evaluation, ...]
    steps: tuple[Step, ...]
    passed: bool
    diverged: bool
    gate_seconds: float
    averaged: bool = False

    @property
    def start_ppl(self) -> float:
        """Quick-window perplexity of the conversion as it is."""
        return self.evaluations[0].ppl


@dataclass(frozen=True)
class Figures:
    """Perplexities of one set of weights on windows that chose nothing, and KL to the teacher in nats.

    `final`: the six-round windows; `served`: their positions after the seal, through the streaming kernel for a student
    and exact for the teacher; `untouched`: windows that neither chose nor judged anything (null: there are none).
    """

    final: float
    served: float
    kl_served: float = 0.0
    untouched: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The same figures for the teacher, the conversion as it is, and the weights of OUT."""

    teacher: Figures
    start: Figures
    final: Figures


@dataclass(frozen=True)
class Before:
    """Everything that was measured before the first step. `gate`, `exact` null: checkpoints are not judged."""

    gate: Judgement | None
    exact: Judgement | None
    teacher: Figures
    start: Figures


@dataclass(frozen=True)
class TrainingRecord:
    """Where the polish loop stands after `step` steps, but for its tensors.

    `generator` is the state of the window sampler, `updates` the steps that the optimizer has counted.
    """

    step: int
    generator: int
    updates: int
    teacher_ppl: float
    best: Evaluation | None
    evaluations: tuple[Evaluation, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class TrainingState:
    """All that the polish loop needs to go on: flat masters and moments [P], the best state (null: step 0's), and the
    average of the masters (null: none is kept).
    """

    record: TrainingRecord
    masters: Vector
    first: Vector
    second: Vector
    best: Vector | None
    average: Vector | None = None


class Keeper(Protocol):
    """Saves the polish loop's state."""

    def wants(self, *, evaluated: bool) -> bool:
        """Whether the state should be saved now, behind a step (`evaluated`: behind a validation)."""

    def keep(self, state: TrainingState) -> None:
        """Take the state before returning, and save it. Raises Interrupted when the run was asked to stop."""


@dataclass(frozen=True)
class Stored:
    """Trained tensors as they will stand in OUT: f32 values, or an encoded payload (uint8). Empty at identity."""

    tensors: Mapping[str, tuple[DType, NDArray[Any]]]
    notes: tuple[str, ...] = ()
