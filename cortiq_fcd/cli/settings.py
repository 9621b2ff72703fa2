"""The options that make a PolishConfig: one table from flag to field, for all commands that take some of them.

The help texts are written out here, not taken from the pydantic models, so that `--help` imports neither; a test holds
the defaults in them against the models.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

Flags = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One option: the field of PolishConfig it sets, its flag, its type, where the help shows it and what it says."""

    field: str
    flag: str
    kind: type
    metavar: str
    panel: str
    help: str

    @property
    def parameter(self) -> str:
        """Name of the command function's parameter."""
        return self.field.replace(".", "_")


TEXT, ATTENTION, TRAINING, GATE, MACHINE, OUTPUT = "Text", "O(1) attention", "Training", "Gate", "Machine", "Output"
FILE_FIRST = "default: as the file says, else"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "corpus.train",
        "--corpus",
        str,
        "FILE",
        TEXT,
        "UTF-8 text, or token ids as .npy or .json; default: the built-in text",
    ),
    Setting(
        "corpus.val", "--val-corpus", str, "FILE", TEXT, "validation text or ids; default: last tenth of the corpus"
    ),
    Setting(
        "corpus.max_train_bytes", "--max-train-bytes", int, "N", TEXT, "cut the text after N bytes; default: 2000000"
    ),
    Setting(
        "corpus.max_val_bytes",
        "--max-val-bytes",
        int,
        "N",
        TEXT,
        "cut the validation text after N bytes; default: 200000",
    ),
    Setting(
        "o1.layers",
        "--o1",
        str,
        "SET",
        ATTENTION,
        f"layers to convert: all, deepN, i,j,k, or auto:N, the N that cost least; {FILE_FIRST} all",
    ),
    Setting("o1.m", "--o1-m", int, "N", ATTENTION, f"landmarks per query head, at least 4; {FILE_FIRST} 32"),
    Setting("o1.w", "--o1-window", int, "N", ATTENTION, f"window of exact recent keys, tokens; {FILE_FIRST} 128"),
    Setting("o1.sink", "--o1-sink", int, "N", ATTENTION, f"permanent exact first keys, tokens; {FILE_FIRST} 4"),
    Setting(
        "o1.prefill", "--prefill", int, "N", ATTENTION, "seal point in training windows, tokens; default: seq // 2"
    ),
    Setting(
        "train.recipe", "--recipe", str, "NAME", TRAINING, "certified or plus (docs/recipe.md); default: certified"
    ),
    Setting("train.steps", "--steps", int, "N", TRAINING, "optimizer steps; default: 300"),
    Setting("train.lr", "--lr", float, "X", TRAINING, "AdamW learning rate, at its peak; default: 5e-05"),
    Setting("train.kl", "--kl", float, "X", TRAINING, "weight of KL to the exact model, 0 to 1; default: 0.7"),
    Setting(
        "train.eval_every", "--eval-every", int, "N", TRAINING, "steps between validations, 0 = never; default: 25"
    ),
    Setting("train.batch", "--batch", int, "N", TRAINING, "windows per step; default: 2"),
    Setting("train.seq", "--seq", int, "N", TRAINING, "window length, tokens; default: 512"),
    Setting("train.seed", "--seed", int, "N", TRAINING, "seed of the window sampler; default: 0"),
    Setting("train.schedule", "--schedule", str, "NAME", TRAINING, "constant, cosine or trapezoid; default: constant"),
    Setting("train.warmup", "--warmup", int, "N", TRAINING, "steps until the learning rate is at its peak; default: 0"),
    Setting(
        "train.norm_lr", "--norm-lr", float, "X", TRAINING, "learning rate of norm gains, times --lr; default: 1.0"
    ),
    Setting("train.temperature", "--temperature", float, "X", TRAINING, "temperature of the KL; default: 1.0"),
    Setting(
        "train.match", "--match", float, "X", TRAINING, "weight of matching each layer's exact output; default: 0.0"
    ),
    Setting(
        "train.gain_limit",
        "--gain-limit",
        float,
        "X",
        TRAINING,
        "no gradient for O(1) rows more than X times as long as any value; default: no limit",
    ),
    Setting(
        "train.clip", "--clip", str, "NAME", TRAINING, "norm of the gradient: whole, or layer by layer; default: whole"
    ),
    Setting(
        "train.ema", "--ema", float, "X", TRAINING, "decay of an average of the weights, 0 to 1, 0 = none; default: 0.0"
    ),
    Setting("train.sampling", "--sampling", str, "NAME", TRAINING, "windows at random, or each once; default: random"),
    Setting("train.seals", "--seals", str, "NAME", TRAINING, "seal points of windows: fixed or varied; default: fixed"),
    Setting("train.polish_only", "--polish-only", bool, "", TRAINING, "train, but leave attention exact; default: off"),
    Setting("train.teacher", "--teacher", str, "FILE", TRAINING, "a CMF file to learn from; default: IN itself, exact"),
    Setting(
        "gate.enabled", "--gate/--no-gate", bool, "", GATE, "let loop scores of generated text choose; default: gate"
    ),
    Setting(
        "gate.profile",
        "--gate-profile",
        str,
        "NAME",
        GATE,
        "standard: 3 prompts x 60 tokens; strict: 16 x 128, no tight loops; default: standard",
    ),
    Setting(
        "gate.threshold", "--gate-threshold", float, "X", GATE, "highest loop score that passes, 0 to 1; default: 0.35"
    ),
    Setting(
        "gate.slack",
        "--gate-slack",
        float,
        "X",
        GATE,
        "how far a prompt may loop more than before, 0 to 1; default: 0.1",
    ),
    Setting(
        "gate.require_pass",
        "--require-pass",
        bool,
        "",
        GATE,
        "exit 10, writing nothing, if nothing passes; default: off",
    ),
    Setting("compute.device", "--device", str, "NAME", MACHINE, "auto, cpu, cuda, cuda:i or mps; default: auto"),
    Setting(
        "compute.precision",
        "--precision",
        str,
        "NAME",
        MACHINE,
        "of matrix products: f32, bf16 (faster, learns a little worse) or auto, which is f32; default: auto",
    ),
    Setting("compute.threads", "--threads", int, "N", MACHINE, "CPU threads; default: all that the process may use"),
    Setting(
        "compute.shard_optimizer",
        "--shard-optimizer",
        bool,
        "",
        MACHINE,
        "divide masters and moments over the processes of torchrun; default: off",
    ),
    Setting(
        "compute.shard_model",
        "--shard-model",
        bool,
        "",
        MACHINE,
        "divide frozen layers over the processes of torchrun, at the cost of transfers; default: off",
    ),
    Setting(
        "compute.memory_budget",
        "--memory-budget",
        str,
        "SIZE",
        MACHINE,
        "memory to live in, such as 2.4G, 800M or 2GiB, at the cost of time; default: what is free",
    ),
    Setting(
        "output.save_dtype",
        "--save-dtype",
        str,
        "TYPE",
        OUTPUT,
        "trained tensors as f32, f16, bf16, q8_row or q8_2f; default: f32",
    ),
    Setting("output.force", "--force", bool, "", OUTPUT, "replace an existing OUT; default: off"),
    Setting("output.report", "--report", str, "FILE", OUTPUT, "where the JSON report goes; default: OUT.report.json"),
    Setting(
        "output.log_jsonl",
        "--log-jsonl",
        str,
        "FILE",
        OUTPUT,
        "append every step's numbers, a JSON object a line; default: off",
    ),
    Setting(
        "output.tensorboard",
        "--tensorboard",
        str,
        "DIR",
        OUTPUT,
        "TensorBoard event files, needs cortiq-fcd[tensorboard]; default: off",
    ),
    Setting(
        "output.resume",
        "--resume/--restart",
        bool,
        "",
        OUTPUT,
        "go on from OUT.partial, or start over; default: resume when a matching checkpoint exists",
    ),
    Setting(
        "output.checkpoint_minutes",
        "--checkpoint-minutes",
        float,
        "X",
        OUTPUT,
        "most minutes between checkpoints, every validation saves one too; default: 10.0",
    ),
)
FIELDS = tuple(setting.field for setting in SETTINGS)
FLAG_OF = {setting.field: setting.flag for setting in SETTINGS}
HELP_OF = {setting.field: setting.help for setting in SETTINGS}


def whole_number(text: str) -> int:
    """An option's value; what typer says of one that is none depends on its version."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number, got {reprlib.repr(text)}") from None


def number(text: str) -> float:
    """The same for numbers with a fraction."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number, got {reprlib.repr(text)}") from None


def takes_settings(command: Callable[..., None] | None = None, *, only: Collection[str] = FIELDS) -> Callable[..., Any]:
    """Give a command one option for every row of SETTINGS, or those of `only` some fields; the ones that were used
    reach it as `flags`, by field.
    """
    if command is None:
        return functools.partial(takes_settings, only=only)
    settings = [setting for setting in SETTINGS if setting.field in only]
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "flags"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {setting.field: values.pop(setting.parameter) for setting in settings}
        command(**values, flags={field: value for field, value in given.items() if value is not None})

    options = [_option(setting) for setting in settings]
    run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    return run


def _option(setting: Setting) -> inspect.Parameter:
    metavar = setting.metavar or None
    text = setting.help.replace("[", "\\[")  # the help is rich markup: a plain bracket would be taken for a style
    option = typer.Option(
        setting.flag,
        help=text,
        metavar=metavar,
        rich_help_panel=setting.panel,
        show_default=False,
        parser={int: whole_number, float: number}.get(setting.kind),
    )
    annotation = Annotated[setting.kind | None, option]  # type: ignore[name-defined]
    return inspect.Parameter(setting.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
