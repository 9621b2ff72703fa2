"""What happens during a polish, as values: stages emit them, a display shows them, `--progress json` prints them.

A `Listener` is the whole progress protocol: a function that takes one event. It must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_serialization_defaults_required=True)


class StageEvent(_Event):
    """A stage began (seconds is null) or ended."""

    event: Literal["stage"] = "stage"
    stage: Literal["prepare", "choose", "estimate", "dequantize", "replica", "gate", "polish", "evaluate", "provenance"]
    detail: str = Field(default="", description="one line for people: what the stage works on")
    seconds: float | None = Field(default=None, description="duration in seconds; null while the stage runs")


class StepEvent(_Event):
    """One optimizer step. ce and kl are means over the step's positions, unweighted, in nats."""

    event: Literal["step"] = "step"
    step: int = Field(description="1-based")
    steps: int
    ce: float
    kl: float
    grad_norm: float = Field(description="global gradient norm before clipping")
    seconds: float
    tokens: int = Field(description="positions trained in this step: batch times seq")


class EvalEvent(_Event):
    """A validation perplexity on the quick windows. Step 0 is the conversion as it is."""

    event: Literal["eval"] = "eval"
    step: int
    ppl: float
    teacher_ppl: float
    start_ppl: float
    best_step: int | None = Field(description="the checkpoint that would be written if training stopped now")
    best_ppl: float | None


class GateEvent(_Event):
    """The generation gate's verdict over one checkpoint."""

    event: Literal["gate"] = "gate"
    step: int
    scores: list[float] = Field(description="loop score of each prompt, 0 to 1")
    passed: bool
    tight_loops: int = Field(default=0, description="texts that failed for ending in a tight loop (strict profile)")


class WarningEvent(_Event):
    """Something a user should know, also kept in the report's `warnings`."""

    event: Literal["warning"] = "warning"
    message: str


class DoneEvent(_Event):
    """The output is in place."""

    event: Literal["done"] = "done"
    outcome: Literal["polished", "identity"]
    output: str
    report: str
    sentence: str = Field(description="the outcome in one plain sentence")


Event = Annotated[
    StageEvent | StepEvent | EvalEvent | GateEvent | WarningEvent | DoneEvent, Field(discriminator="event")
]
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of the library's default: says nothing."""
