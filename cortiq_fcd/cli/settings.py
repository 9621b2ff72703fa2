"""The options that make a PolishConfig: one table from flag to field, used by `polish` and `config`.

The help texts are written out here, not taken from the pydantic models, so that `--help` imports neither; a test holds
the defaults in them against the models.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import re
import reprlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortiq_fcd.cli.paths import check_name
from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from cortiq_fcd.stages.config import PolishConfig

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
    Setting("train.steps", "--steps", int, "N", TRAINING, "optimizer steps; default: 300"),
    Setting("train.lr", "--lr", float, "X", TRAINING, "AdamW learning rate, constant; default: 5e-05"),
    Setting("train.kl", "--kl", float, "X", TRAINING, "weight of KL to the exact model, 0 to 1; default: 0.7"),
    Setting(
        "train.eval_every", "--eval-every", int, "N", TRAINING, "steps between validations, 0 = never; default: 25"
    ),
    Setting("train.batch", "--batch", int, "N", TRAINING, "windows per step; default: 2"),
    Setting("train.seq", "--seq", int, "N", TRAINING, "window length, tokens; default: 512"),
    Setting("train.seed", "--seed", int, "N", TRAINING, "seed of the window sampler; default: 0"),
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
        "compute.memory_budget",
        "--memory-budget",
        str,
        "SIZE",
        MACHINE,
        "memory to live in, such as 2.4G, 800M or 2GiB, at the cost of time; default: no limit",
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
PATHS = ("corpus.train", "corpus.val", "train.teacher", "output.report", "output.log_jsonl", "output.tensorboard")
SIZES = ("compute.memory_budget",)
_SIZE = re.compile(r"(?P<number>\d{1,20}(\.\d{0,20})?) ?((?P<unit>[KMGT]?)(?P<binary>i?)B?)", re.ASCII | re.IGNORECASE)
MOST_COUNT = 2**31 - 1
MOST = {
    "corpus.max_train_bytes": 2**62,
    "corpus.max_val_bytes": 2**62,
    "compute.memory_budget": 2**62,
    "train.seed": 2**64 - 1,
    "train.lr": 1000.0,  # AdamW moves each weight by about this much: far beyond any use, far below overflow
}
MOST_TOML_BYTES = 1_000_000
_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 100
FIELDS = tuple(setting.field for setting in SETTINGS)
FLAG_OF = {setting.field: setting.flag for setting in SETTINGS}


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
    option = typer.Option(setting.flag, help=text, metavar=metavar, rich_help_panel=setting.panel, show_default=False)
    annotation = Annotated[setting.kind | None, option]  # type: ignore[name-defined]
    return inspect.Parameter(setting.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def resolve(flags: Flags, file: Path | None) -> PolishConfig:
    """The configuration that flags and a TOML file make together; flags win. Raises ConfigError."""
    from pydantic import ValidationError

    from cortiq_fcd.stages.config import PolishConfig

    merged = read_toml(file) if file is not None else {}
    for field, value in flags.items():
        section, key = field.split(".")
        table = merged.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} should be a table, got {_shown(table)}", hint=f"[{section}]")
        table[key] = value
    _check_paths(merged, flags, file)
    _read_sizes(merged, flags, file)
    try:
        config = PolishConfig.model_validate(merged)
    except ValidationError as error:
        raise _explained(error, flags, file) from error
    _check_ranges(config, flags, file)
    return config


def _check_paths(merged: dict[str, Any], flags: Flags, file: Path | None) -> None:
    """Replace texts by paths, which strict models want; ConfigError for those that no file system takes."""
    for field in PATHS:
        section, key = field.split(".")
        table = merged.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = Path(table[key])
            check_name(table[key], f"{_where(field, flags, file)} {table[key]}")


def _read_sizes(merged: dict[str, Any], flags: Flags, file: Path | None) -> None:
    """Replace texts such as 2.4G by bytes; ConfigError for what is no size."""
    for field in SIZES:
        section, key = field.split(".")
        table = merged.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _bytes_of(table[key], _where(field, flags, file))


def _bytes_of(text: str, where: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{where}: {_shown(text)} is not a size", hint="such as 2.4G, 800M, 1.5GiB, or bytes")
    power, binary = " KMGT".index(match["unit"].upper() or " "), match["binary"]
    nbytes: int = round(float(match["number"]) * (1024 if binary else 1000) ** power)
    if nbytes < 1:
        raise ConfigError(f"{where}: {_shown(text)} is no memory at all", hint="such as 2.4G, 800M, 1.5GiB, or bytes")
    return nbytes


def _check_ranges(config: PolishConfig, flags: Flags, file: Path | None) -> None:
    """What is valid, but larger than any run could use and than the libraries' numbers go."""
    for section, table in config:
        for key in type(table).model_fields:
            field, value = f"{section}.{key}", getattr(table, key)
            most = MOST.get(field, MOST_COUNT)
            if isinstance(value, (int, float)) and value > most:
                where = _where(field, flags, file)
                raise ConfigError(
                    f"{where}: input should be less than or equal to {most}, got {_shown(value)}",
                    hint="cortiq-fcd polish --help lists units and defaults",
                )


def _where(field: str, flags: Flags, file: Path | None) -> str:
    return FLAG_OF[field] if field in flags else f"{file}: {field}"


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file as a dictionary. Raises ConfigError."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    check_name(file, f"--config {file}")
    try:
        text = _small_text(file)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}", hint="give a file as `config` prints it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {file} is not valid TOML: {error}", hint="save it as UTF-8") from error
    try:
        table: dict[str, Any] = toml.loads(text)
    except ValueError as error:  # TOMLDecodeError, and int() of thousands of digits
        raise ConfigError(f"--config {file} is not valid TOML: {error}", hint="`config` prints a valid one") from error
    except RecursionError:
        raise ConfigError(f"--config {file} is nested too deeply", hint="`config` prints a valid one") from None
    return table


def _small_text(file: Path) -> str:
    """The text of a regular file; a pipe might never end, and a device never does."""
    if file.is_dir():
        raise ConfigError(f"--config {file} is a folder", hint="name a .toml file in it")
    if file.exists() and not file.is_file():
        raise ConfigError(f"--config {file}: is not a regular file", hint="save the settings in a file first")
    if file.stat().st_size > MOST_TOML_BYTES:
        raise ConfigError(
            f"--config {file}: {file.stat().st_size:,} bytes are too many for settings",
            hint=f"at most {MOST_TOML_BYTES:,} bytes",
        )
    return file.read_text(encoding="utf-8")


def _shown(value: Any) -> str:
    """A value in a message: short, and without the errors that huge numbers and deep tables meet."""
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):
        return f"a huge {type(value).__name__}"


def _explained(error: ValidationError, flags: Flags, file: Path | None) -> ConfigError:
    hints = []
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(map(str, item["loc"]))
        where = _where(field, flags, file)
        if item["type"] == "extra_forbidden":
            parts.append(f"{where} is no setting")
            close = difflib.get_close_matches(field, FLAG_OF, n=1)
            hints += [f"did you mean {close[0]}?"] if close else []
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            parts.append(f"{where}: {message}, got {_shown(item['input'])}")
    return ConfigError("; ".join(parts), hint="\n".join(hints) or "cortiq-fcd polish --help lists units and defaults")


def to_toml(config: PolishConfig, encoding: str = "utf-8") -> str:
    """The configuration as TOML that `--config` reads back; what is not set is a comment. `encoding`: what it lacks is
    escaped.
    """
    lines = []
    for section, table in config:
        lines.append(f"[{section}]")
        for key, field in type(table).model_fields.items():
            value = getattr(table, key)
            lines.append(f"# {field.description}")
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml_value(value, encoding)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any, encoding: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    from cortiq_fcd.display.figures import is_plain

    text = json.dumps(str(value), ensure_ascii=False)
    return "".join(char if is_plain(char, encoding) else f"\\U{ord(char):08x}" for char in text)
