"""Copies of a run's numbers for other programs. A place where none can be kept is refused before the run; a log that
fails later gives a warning and ends, and the run goes on.

`--log-jsonl` appends one flat JSON object a line, with the keys of W&B's history files (`_step`, `_timestamp`).
`--tensorboard` writes TensorBoard's event files through tensorboardX, an extra of this package.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.events import EvalEvent, Event, GateEvent, StepEvent
from cortiq_fcd.stages.config import OutputConfig

MOST_LINE_BYTES = 1 << 16  # a line of a log is much shorter

Numbers = dict[str, float | None]


class Log(Protocol):
    """Takes the numbers of a step. `name`: the option that asked for it."""

    name: str

    def write(self, step: int, numbers: Numbers) -> None:
        """Keep them. Whatever it raises ends this log only."""

    def close(self) -> None:
        """Nothing more comes."""


def numbers_of(event: Event) -> tuple[int, Numbers] | None:
    """The step and the numbers of an event, by name; null for events without numbers."""
    if isinstance(event, StepEvent):
        speed = event.tokens / event.seconds if event.seconds > 0 else None
        values = {"ce": event.ce, "kl": event.kl, "grad_norm": event.grad_norm, "tokens_per_s": speed}
        return event.step, {f"train/{name}": value for name, value in values.items()}
    if isinstance(event, EvalEvent):
        values = {"ppl": event.ppl, "best_ppl": event.best_ppl}
        return event.step, {f"val/{name}": value for name, value in values.items()}
    if isinstance(event, GateEvent):
        worst = max(event.scores, default=None)
        return event.step, {"gate/worst_loop_score": worst, "gate/passed": float(event.passed)}
    return None


def check_logs(config: OutputConfig) -> None:
    """ConfigError for a log that could not be opened where it was asked for. Nothing is made."""
    if (path := config.log_jsonl) is not None and (fault := _fault_of_file(path)):
        raise ConfigError(f"--log-jsonl {path}: {fault}", hint="name a new file in a folder that is there")
    if (path := config.tensorboard) is not None and (fault := _fault_of_folder(path)):
        raise ConfigError(f"--tensorboard {path}: {fault}", hint="name a new folder, or one of event files")


def _fault_of_file(path: Path) -> str:
    """Why no log can be kept there; empty if one can."""
    try:
        if not os.path.lexists(path):
            folder = Path(os.path.realpath(path)).parent
            if not folder.is_dir():
                return f"there is no folder {folder}"
            return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} can't be written to"
        if not path.is_file():
            return "it is not a regular file"
        with path.open("rb") as file:
            if not _is_of_a_log(file.readline(MOST_LINE_BYTES)):
                return "it holds something else than a log of steps"
        return "" if os.access(path, os.W_OK) else "it can't be written to"
    except OSError as error:
        return error.strerror or str(error)


def _fault_of_folder(path: Path) -> str:
    """Why no folder of event files can be there; empty if one can."""
    try:
        real = Path(os.path.realpath(path))
        there = next(place for place in (real, *real.parents) if os.path.lexists(place))
        if not there.is_dir():
            return f"{there} is not a folder"
        return "" if os.access(there, os.W_OK | os.X_OK) else f"the folder {there} can't be written to"
    except OSError as error:
        return error.strerror or str(error)


def open_logs(config: OutputConfig) -> list[Log]:
    """The logs that were asked for; nothing is opened before the first numbers come."""
    logs: list[Log] = []
    if config.log_jsonl is not None:
        logs.append(JsonLinesLog(config.log_jsonl))
    if config.tensorboard is not None:
        logs.append(TensorBoardLog(config.tensorboard))
    return logs


class JsonLinesLog:
    """Appends to a file; never to one that holds something else."""

    def __init__(self, path: Path) -> None:
        self.name = f"--log-jsonl {path}"
        self._path = path
        self._file: TextIO | None = None

    def write(self, step: int, numbers: Numbers) -> None:
        """Append one line."""
        if self._file is None:
            self._file = self._open()
        known = {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"_step": step, "_timestamp": time.time(), **known}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        if fault := _fault_of_file(self._path):
            raise ValueError(fault)
        return self._path.open("a", encoding="utf-8")


def _is_of_a_log(line: bytes) -> bool:
    """Whether a file that begins with this line may grow: an empty one, or one of steps. Other JSON is not ours."""
    if not line:
        return True
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "_step" in found


class TensorBoardLog:
    """Scalars in a folder of event files."""

    def __init__(self, folder: Path) -> None:
        self.name = f"--tensorboard {folder}"
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, numbers: Numbers) -> None:
        """Add one value to each curve."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        try:
            tensorboard = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ValueError("tensorboardX is not installed: pip install 'cortiq-fcd[tensorboard]'") from error
        # A run that goes on takes back what it had logged behind its checkpoint.
        return tensorboard.SummaryWriter(str(self._folder), purge_step=step)
