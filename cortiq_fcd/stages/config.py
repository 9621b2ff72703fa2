"""What a polish is asked to do. Strict, frozen, no unknown fields; `cortiq_fcd.cli` fills it from flags.

Null means "not said": the file's own `provenance.o1_attn` decides, then the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from cortiq_fcd.io.paths import printable

# JSON holds no path that is not UTF-8.
PathSetting = Annotated[Path, PlainSerializer(printable, return_type=str, when_used="json")]
SaveDtype = Literal["f32", "f16", "bf16", "q8_row", "q8_2f"]
GateProfile = Literal["standard", "strict"]


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


class TrainConfig(_Config):
    """The recipe. Defaults are the certified one."""

    steps: int = Field(default=300, ge=1, description="optimizer steps")
    lr: float = Field(default=5e-5, gt=0, le=1e3, allow_inf_nan=False, description="AdamW learning rate, constant")
    kl: float = Field(default=0.7, ge=0, le=1, description="weight of KL(teacher || student); CE has the rest")
    eval_every: int = Field(default=25, ge=0, description="steps between validations; 0 = never")
    batch: int = Field(default=2, ge=1, le=2**20, description="windows per step")
    seq: int = Field(default=512, ge=2, le=2**20, description="window length, tokens")
    seed: int = Field(default=0, ge=0, lt=2**64, description="seed of the window sampler")
    polish_only: bool = Field(default=False, description="train the layers but leave their attention exact")
    teacher: PathSetting | None = Field(default=None, description="a CMF file to learn from; default: IN itself, exact")


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
