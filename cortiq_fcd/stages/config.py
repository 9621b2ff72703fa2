"""What a polish is asked to do. Strict, frozen, no unknown fields; `cortiq_fcd.cli` fills it from flags.

Null means "not said": the file's own `provenance.o1_attn` decides, then the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from cortiq_fcd.io.paths import printable

# JSON holds no path that is not UTF-8.
PathSetting = Annotated[Path, PlainSerializer(printable, return_type=str, when_used="json")]
SaveDtype = Literal["f32", "f16", "bf16", "q8_row", "q8_2f"]
GateProfile = Literal["standard", "strict"]
Recipe = Literal["certified", "plus"]
Schedule = Literal["constant", "cosine", "trapezoid"]
Sampling = Literal["random", "once"]
Clip = Literal["whole", "layer"]
Seals = Literal["fixed", "varied"]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class O1Config(_Config):
    """Which layers run the O(1) kernel, and its geometry. A null field falls back to the file, then to the default."""

    layers: str | None = Field(
        default=None, description="all, deepN (the N deepest), i,j,k, or auto:N (the N that cost least); default all"
    )
    m: int | None = Field(default=None, ge=4, description="landmarks per query head; default 32")
    w: int | None = Field(default=None, ge=1, description="window of exact recent keys, tokens; default 128")
    sink: int | None = Field(default=None, ge=0, description="permanent exact first keys, tokens; default 4")
    prefill: int | None = Field(
        default=None, ge=1, description="seal point in training windows, tokens; default seq // 2"
    )


class CorpusConfig(_Config):
    """Where the training and validation tokens come from."""

    train: PathSetting | None = Field(
        default=None, description="UTF-8 text, or .npy/.json token ids; default: the built-in text"
    )
    val: PathSetting | None = Field(
        default=None, description="validation text or ids; default: the last tenth of the training tokens"
    )
    max_train_bytes: int = Field(default=2_000_000, ge=1, description="text beyond this many bytes is cut off")
    max_val_bytes: int = Field(default=200_000, ge=1, description="text beyond this many bytes is cut off")


# What a recipe sets where nothing else is said. The certified one is the defaults of TrainConfig.
RECIPES: Mapping[Recipe, Mapping[str, Any]] = {
    "certified": {},
    "plus": {"lr": 2e-4, "seals": "varied", "gain_limit": 1.0, "clip": "layer"},
}


class TrainConfig(_Config):
    """The recipe. Defaults are the certified one; `recipe` chooses others."""

    recipe: Recipe = Field(default="certified", description="certified, or plus: other defaults for what follows")
    steps: int = Field(default=300, ge=1, description="optimizer steps")
    lr: float = Field(default=5e-5, gt=0, le=1e3, allow_inf_nan=False, description="AdamW learning rate, at its peak")
    schedule: Schedule = Field(
        default="constant",
        description="of the rate: constant, cosine (falls to a tenth) or trapezoid (falls to 0 over the last fifth)",
    )
    warmup: int = Field(default=0, ge=0, description="steps over which the rate rises to its peak")
    norm_lr: float = Field(
        default=1.0, gt=0, le=1e3, allow_inf_nan=False, description="rate of the norm gains, times the others'"
    )
    kl: float = Field(default=0.7, ge=0, le=1, description="weight of KL(teacher || student); CE has the rest")
    temperature: float = Field(
        default=1.0, ge=0.1, le=100, allow_inf_nan=False, description="of the KL's two distributions"
    )
    match: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="weight of the distance between each trained layer's output and the exact model's",
    )
    gain_limit: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="O(1) rows with an output so many times longer than every value get no gradient; default: none",
    )
    clip: Clip = Field(
        default="whole",
        description="whole: the gradient's norm is at most 1; layer: each of L layers', 1 / sqrt(L)",
    )
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="decay of the weights' moving average, which competes at every validation; 0 = none is kept",
    )
    eval_every: int = Field(default=25, ge=0, description="steps between validations; 0 = never")
    batch: int = Field(default=2, ge=1, le=2**20, description="windows per step")
    seq: int = Field(default=512, ge=2, le=2**20, description="window length, tokens")
    sampling: Sampling = Field(
        default="random", description="of windows: random, or once (none again before all have been seen)"
    )
    seals: Seals = Field(
        default="fixed", description="seal points of training windows: fixed, or varied from step to step"
    )
    seed: int = Field(default=0, ge=0, lt=2**64, description="seed of the window sampler")
    polish_only: bool = Field(default=False, description="train the layers but leave their attention exact")
    teacher: PathSetting | None = Field(default=None, description="a CMF file to learn from; default: IN itself, exact")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """What is not said is as the recipe has it."""
        recipe = RECIPES.get(given.get("recipe", "certified")) if isinstance(given, dict) else None
        return given if recipe is None else {**recipe, **given}


class GateConfig(_Config):
    """The generation gate."""

    enabled: bool = Field(default=True, description="decode through the served kernel and let loop scores choose")
    profile: GateProfile = Field(
        default="standard",
        description="standard: 3 prompts x 60 tokens; strict: 16 x 128 beside the validation windows, no tight loops",
    )
    threshold: float = Field(default=0.35, ge=0, le=1, description="highest loop score that passes")
    slack: float = Field(default=0.10, ge=0, le=1, description="how far a prompt may loop more than before training")
    every_checkpoint: bool = Field(default=False, description="also judge checkpoints that can't win (library only)")
    require_pass: bool = Field(default=False, description="write nothing and fail when no checkpoint passes")


class ComputeConfig(_Config):
    """What it runs on."""

    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:i or mps")
    precision: Literal["auto", "f32", "bf16"] = Field(
        default="auto",
        description="of the factors of matrix products; auto is f32: bf16 is faster and learns a little worse",
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: all the process may use")
    shard_optimizer: bool = Field(
        default=False, description="divide masters and moments over the processes that torchrun started"
    )
    shard_model: bool = Field(
        default=False, description="divide frozen layers over the processes that torchrun started"
    )
    memory_budget: int | None = Field(
        default=None,
        ge=1,
        le=2**62,
        description="bytes of memory to live in, at the cost of time; default: what is free",
    )


class OutputConfig(_Config):
    """What is written."""

    save_dtype: SaveDtype = Field(default="f32", description="dtype of the trained tensors in OUT")
    force: bool = Field(default=False, description="replace an existing OUT")
    report: PathSetting | None = Field(default=None, description="where the JSON report goes; default OUT.report.json")
    log_jsonl: PathSetting | None = Field(
        default=None, description="append the numbers of every step to this file, a JSON object a line; default: off"
    )
    tensorboard: PathSetting | None = Field(
        default=None, description="write TensorBoard event files into this folder; default: off"
    )
    resume: bool | None = Field(
        default=None, description="true: a checkpoint must be there; false: start over; default: resume if one matches"
    )
    checkpoint_minutes: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="most minutes between checkpoints; each validation saves too",
    )


class PolishConfig(_Config):
    """Everything a polish is asked to do."""

    o1: O1Config = O1Config()
    corpus: CorpusConfig = CorpusConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
    compute: ComputeConfig = ComputeConfig()
    output: OutputConfig = OutputConfig()
