"""The base of all records, and the recipe as a report and a file tell it. Nothing here imports torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from cortiq_fcd.stages.config import Clip, Recipe, Sampling, Schedule, Seals


class Record(BaseModel):
    """Base of all records: frozen, no unknown fields, no NaN and no infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        json_schema_serialization_defaults_required=True,
    )


class Document(Record):
    """A record that is printed, or written, as a JSON file of its own."""

    def to_json(self) -> str:
        """The document as JSON text, the way it is written."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


class RecipeElements(Record):
    """What a recipe adds to the certified one; the defaults add nothing."""

    recipe: Recipe = Field(default="certified", description="whose defaults were used")
    schedule: Schedule = Field(default="constant", description="of the learning rate: constant, cosine or trapezoid")
    warmup: int = Field(default=0, ge=0, description="steps over which the rate rose to its peak")
    norm_lr: float = Field(default=1.0, gt=0, description="rate of the norm gains, times the others'")
    temperature: float = Field(default=1.0, gt=0, description="of the KL's two distributions")
    match: float = Field(default=0.0, ge=0, description="weight of matching each trained layer's exact output")
    gain_limit: float | None = Field(
        default=None, gt=0, description="rows with a larger gain got no gradient; null: all"
    )
    clip: Clip = Field(default="whole", description="whether the gradient was clipped as a whole, or layer by layer")
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay of the weights' moving average; 0 = none was kept")
    sampling: Sampling = Field(default="random", description="of windows: random, or each once before any again")
    seals: Seals = Field(default="fixed", description="seal points of training windows: fixed, or varied by step")


class RecipeInfo(RecipeElements):
    """The training recipe as it was used."""

    steps: int = Field(ge=0, description="optimizer steps asked for")
    lr: float = Field(description="AdamW learning rate, at its peak")
    kl: float = Field(description="weight of KL(teacher || student); CE has the rest")
    eval_every: int = Field(ge=0, description="steps between validations; 0 = only after the last")
    batch: int = Field(ge=1, description="windows per step")
    seq: int = Field(ge=2, description="window length, tokens")
    seed: int = Field(ge=0, description="seed of the window sampler")
    polish_only: bool = Field(default=False, description="attention stayed exact on both sides")
    teacher: str | None = Field(default=None, description="separate teacher file; null = the source itself")
