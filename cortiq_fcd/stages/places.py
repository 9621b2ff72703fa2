"""What a polish may write where: no file that the run reads, none of a stranger, none that it would remove itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.io.atomic import check_output_path
from cortiq_fcd.io.paths import is_inside, is_regular
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.stages.checkpoint_folder import ANNOUNCEMENT, check_folder, finished, folder_of
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.logs import check_logs


def read_by(model: AnyModel, config: PolishConfig, protected: Iterable[Path] = ()) -> list[Path]:
    """Every file that the run reads: shards, teacher, texts, the tokenizer beside the model, and the caller's own."""
    beside = model.path.parent / "tokenizer.json"
    settings = (config.train.teacher, config.corpus.train, config.corpus.val)
    return [*model.paths, *filter(None, settings), beside, *protected]


def check_places(inputs: list[Path], out: Path, config: PolishConfig) -> Path:
    """The report's path. ConfigError, ResourceError: as `check_output_path`, `check_folder`, and for places of ours."""
    check_folder(out)
    # An OUT that was announced may be this run's own, of a process that was killed after it: known later.
    announced = is_regular(folder_of(out) / ANNOUNCEMENT)
    check_output_path(inputs, out, config.output.force or announced)
    for path in inputs:
        if is_inside(path, folder_of(out)) or is_inside(path, finished(folder_of(out))):
            raise ConfigError(
                f"{path}: is inside {folder_of(out)}, whose files go when the run ends",
                hint="move it, or name another OUT",
            )
    default = out.with_name(out.name + ".report.json")
    report = config.output.report or default
    if _is_ours(report, out):
        raise ConfigError(f"--report {report}: is a place of this program's own temporary files", hint="name another")
    check_output_path([*inputs, out], report, config.output.force or report == default or _is_report(report))
    for flag, log in (("--log-jsonl", config.output.log_jsonl), ("--tensorboard", config.output.tensorboard)):
        if log is not None and _is_ours(log, out):
            raise ConfigError(f"{flag} {log}: is a place of this program's own temporary files", hint="name another")
        if log is not None and any(is_inside(log, other) for other in (*inputs, out, report)):
            raise ConfigError(f"{flag} {log}: is a file that the run reads or writes", hint="name another")
    check_logs(config.output)
    return report


def _is_ours(report: Path, out: Path) -> bool:
    temporary = rf"\.{re.escape(out.name)}(\.[0-9a-f]{{16}}\.partial|\.converted\.cmf)"
    beside = os.path.realpath(report.parent) == os.path.realpath(out.parent)
    folders = (folder_of(out), finished(folder_of(out)))
    return (beside and bool(re.fullmatch(temporary, report.name))) or any(is_inside(report, f) for f in folders)


def _is_report(path: Path) -> bool:
    """Whether a file says that it is a report."""
    if not is_regular(path, follow_links=True):
        return False
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and str(said.get("schema")).startswith("cortiq-fcd-report/")
