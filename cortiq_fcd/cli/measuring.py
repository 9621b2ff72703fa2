"""The commands that measure a file and write none: `eval` and `gate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cortiq_fcd.cli.paths import check_name, check_source
from cortiq_fcd.cli.streams import write_json
from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from cortiq_fcd.display.guard import Guarded
    from cortiq_fcd.stages.config import PolishConfig
    from cortiq_fcd.stages.readings import EvalReport, GateReport

Found = TypeVar("Found", "EvalReport", "GateReport")

O1_FIELDS = ("o1.layers", "o1.m", "o1.w", "o1.sink")
COMPUTE_FIELDS = ("compute.device", "compute.precision", "compute.threads")
COMMON_FIELDS = (*O1_FIELDS, "corpus.max_val_bytes", "train.batch", "train.seq", *COMPUTE_FIELDS)
EVAL_FIELDS = (*COMMON_FIELDS, "o1.prefill")
GATE_FIELDS = (*COMMON_FIELDS, "gate.profile", "gate.threshold", "gate.slack")
MOST_WINDOWS = 2**20


def eval_command(
    file: Path,
    settings: PolishConfig,
    text: Path | None,
    windows: int | None,
    listener: Guarded,
    *,
    sweep: bool,
    as_json: bool,
) -> None:
    """Print the perplexities of a file."""
    _check(file, text)
    if windows is not None and not 1 <= windows <= MOST_WINDOWS:
        raise ConfigError(f"--windows {windows}: expected 1 to {MOST_WINDOWS}", hint="one window is enough to try it")
    from cortiq_fcd.display.eval_view import show_eval
    from cortiq_fcd.stages import evaluation

    with listener:
        found = evaluation.run(file, settings, text, windows, listener, with_sweep=sweep)
    _tell(found, show_eval, as_json=as_json)


def gate_command(
    file: Path, settings: PolishConfig, text: Path | None, before: Path | None, listener: Guarded, *, as_json: bool
) -> bool:
    """Print the gate's verdict over a file; whether it passed."""
    _check(file, text)
    if before is not None:
        check_source(before)
    from cortiq_fcd.display.gate_view import show_gate
    from cortiq_fcd.stages import gating

    with listener:
        found = gating.run(file, settings, text, before, listener)
    _tell(found, show_gate, as_json=as_json)
    return found.passed is True


def _tell(found: Found, show: Callable[[Found, Console], None], *, as_json: bool) -> None:
    """Print what was found, for programs or for people."""
    from cortiq_fcd.display.results import result_console

    if as_json:
        write_json(found.to_json())
    else:
        show(found, result_console())


def _check(file: Path, text: Path | None) -> None:
    check_source(file)
    if text is not None:
        check_name(text, f"--text {text}")
