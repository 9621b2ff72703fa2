"""Whether a run goes on from a checkpoint, and what its user is told about the ones that can't be used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.vectors import OnRank0, count
from cortiq_fcd.stages.artefacts import Before, TrainingRecord, TrainingState
from cortiq_fcd.stages.checkpoint import Checkpoint, Checkpoints
from cortiq_fcd.stages.config import OutputConfig
from cortiq_fcd.stages.progress import Progress


def find_checkpoint(
    checkpoints: Checkpoints, config: OutputConfig, progress: Progress, ranks: Ranks = ALONE
) -> Checkpoint | None:
    """The checkpoint to go on from; null: start over. Rank 0 looks, and all ranks get what it finds.

    ConfigError if --resume was given and there is none.
    """
    found = _find(checkpoints, config, progress, ranks) if ranks.rank == 0 else None
    return found if ranks.world == 1 else _shared(found, ranks)


def _find(checkpoints: Checkpoints, config: OutputConfig, progress: Progress, ranks: Ranks) -> Checkpoint | None:
    if config.resume is False:
        return None
    found = checkpoints.find()
    folder = checkpoints.folder
    differences = "; ".join(found.differences)
    if found.checkpoint is None and config.resume:
        reasons = [*found.damaged, *([f"it belongs to another run: {differences}"] if differences else [])]
        raise ConfigError(
            f"--resume: no checkpoint in {folder} can be used ({'; '.join(reasons) or 'there is none'})",
            hint="leave out --resume to start over",
        )
    progress.warn(*found.damaged)
    if found.differences:
        progress.warn(f"a checkpoint in {folder} belongs to another run and is not used: {differences}")
    if found.checkpoint is not None:
        step, wrote = found.checkpoint.state.record.step, found.checkpoint.processes
        progress.warn(f"resumed after step {step}: stage times and peak memory are those of this process alone")
        if wrote != str(ranks.world):
            progress.warn(f"the steps before were of {wrote} process(es), now it is {ranks.world}: rounding differs")
    elif found.damaged or found.differences:
        progress.warn("the run starts over")
    return found.checkpoint


@dataclass(frozen=True)
class _Told:
    """What rank 0 says about a checkpoint; it keeps the tensors, of `length` elements each, until they are wanted."""

    processes: str
    before: Before
    record: TrainingRecord
    length: int
    has_best: bool
    has_average: bool


def _shared(found: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that rank 0 found, on every rank."""
    state = found.state if found else None
    told = ""
    if found and state:
        has = (state.best is not None, state.average is not None)
        text = _Told(found.processes, found.before, state.record, count(state.masters), *has)
        told = json.dumps(asdict(text))
    told = ranks.tell(told)
    if not told:
        return None
    said = TypeAdapter(_Told).validate_python(json.loads(told))

    if state is None:
        there = OnRank0(said.length)
        best, average = (there if has else None for has in (said.has_best, said.has_average))
        state = TrainingState(said.record, there, there, there, best, average)
    return Checkpoint(said.processes, said.before, state)
