"""Whether a run goes on from a checkpoint, and what its user is told about the ones that can't be used."""

from __future__ import annotations

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.stages.checkpoint import Checkpoint, Checkpoints
from cortiq_fcd.stages.config import OutputConfig
from cortiq_fcd.stages.progress import Progress


def find_checkpoint(checkpoints: Checkpoints, config: OutputConfig, progress: Progress) -> Checkpoint | None:
    """The checkpoint to go on from; null: start over. ConfigError if --resume was given and there is none."""
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
        step = found.checkpoint.state.record.step
        progress.warn(f"resumed after step {step}: stage times and peak memory are those of this process alone")
    elif found.damaged or found.differences:
        progress.warn("the run starts over")
    return found.checkpoint
