"""`polish --dry-run`: what a polish would do and need, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cortiq_fcd.cli.streams import write_json, write_text
from cortiq_fcd.display import figures
from cortiq_fcd.display.guard import Guarded
from cortiq_fcd.errors import ResourceError
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.interrupt import Interruption

if TYPE_CHECKING:
    from cortiq_fcd.model.ranks import Ranks
    from cortiq_fcd.stages.estimate import Forecast

MEMORY = {
    "process": "program and libraries",
    "frozen": "weights",
    "teacher": "weights of the teacher file",
    "buffers": "buffers of weights not held",
    "transfers": "buffers of transfers",
    "masters": "masters",
    "gradient": "gradient",
    "moments": "optimizer moments",
    "best": "best state",
    "activations": "activations of a step",
    "logits": "  of these, logits at most",
    "checkpoint_copy": "copy for a checkpoint",
    "evaluation": "evaluation",
}


def forecast_command(
    source: Path,
    out: Path,
    settings: PolishConfig,
    listener: Guarded,
    ranks: Ranks,
    *,
    as_json: bool,
    protected: Iterable[Path] = (),
) -> None:
    """Print the forecast, of rank 0. `protected`: as in `pipeline.run`. ResourceError, after it, if the run would not
    fit.
    """
    with Interruption().handling(), listener:
        from cortiq_fcd.stages import pipeline  # takes seconds

        forecast = pipeline.dry_run(source, out, settings, listener, ranks, protected=protected)
    if ranks.rank == 0 and as_json:
        write_json(json.dumps(asdict(forecast), indent=2) + "\n")
    elif ranks.rank == 0:
        write_text("".join(f"{line}\n" for line in lines(forecast)))
    ranks.sum([0])  # a rank that leaves early looks lost to one that is slower
    refuse_if_too_large(forecast)


def refuse_if_too_large(forecast: Forecast) -> None:
    """ResourceError with what would fit instead, if the run would not."""
    if forecast.fits:
        raise ResourceError("this polish would not fit into memory", hint=forecast.fits)


def lines(forecast: Forecast) -> Iterator[str]:
    """A forecast for people."""
    memory, disk, time = forecast.memory, forecast.disk, forecast.time
    yield f"layers trained       {len(forecast.layers)}: {figures.layers(forecast.layers)}"
    yield f"weights trained      {forecast.trainable_params:,}"
    if forecast.resumes_after_step is not None:
        yield f"would go on          after step {forecast.resumes_after_step}"
    yield f"memory, at most      {figures.size(memory.peak)}"
    for name, words in MEMORY.items():
        if nbytes := getattr(memory, name):
            yield f"  {words:27}{figures.size(nbytes)}"
    if memory.budget is not None:
        yield f"memory budget        {figures.size(memory.budget)}: {forecast.savings}"
    if memory.available is not None:
        more, in_use = figures.size(memory.available), figures.size(memory.in_use)
        yield f"memory available     {more} more than the {in_use} in use"
    yield f"disk                 OUT {figures.size(disk.out)}, checkpoints at most {figures.size(disk.checkpoints)}"
    yield f"disk free            {figures.size(disk.free)}"
    scaled = f", scaled up from {time.tried} of {time.windows} windows" if time.tried < time.windows else ""
    yield f"time, about          {figures.duration(time.total)} on this machine as busy as it is now{scaled}"
    yield f"  a step             {figures.duration(time.step)}"
    judged = ", with the gate" if time.gate else ""
    yield f"  a validation       {figures.duration(time.validation + time.gate)}{judged}"
    yield f"  before and after   {figures.duration(time.before)} and {figures.duration(time.after)}"
