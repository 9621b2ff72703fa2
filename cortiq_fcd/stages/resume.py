"""Whether a run goes on from a checkpoint, and what its user is told about the ones that can't be used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.stages.artefacts import Before, TrainingRecord, TrainingState, Vector
from cortiq_fcd.stages.best import read_vector
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
    """What rank 0 says about a checkpoint before it sends the tensors, of `length` elements each."""

    processes: str
    before: Before
    record: TrainingRecord
    length: int
    has_best: bool


def _shared(found: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that rank 0 found."""
    state = found.state if found else None
    told = ""
    if found and state:
        text = _Told(found.processes, found.before, state.record, _length(state.masters), state.best is not None)
        told = json.dumps(asdict(text))
    told = ranks.tell(told)
    if not told:
        return None
    said = TypeAdapter(_Told).validate_python(json.loads(told))

    def vector(of_rank_0: Vector | None) -> Tensor:
        values = torch.empty(said.length) if of_rank_0 is None else read_vector(of_rank_0)
        ranks.spread(values)
        return values

    masters, first, second = (
        vector(getattr(state, name) if state else None) for name in ("masters", "first", "second")
    )
    best = vector(state.best if state else None) if said.has_best else None
    return Checkpoint(said.processes, said.before, TrainingState(said.record, masters, first, second, best))


def _length(vector: Vector) -> int:
    return len(vector) if isinstance(vector, Tensor) else vector.count
