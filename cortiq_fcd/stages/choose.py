"""`--o1 auto:N`: convert the N layers that cost least, each tried alone on a few windows of text.

The windows are spread over a text that neither validates nor judges; the same file, text and setting always choose the
same layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.events import ignore
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.conversion import Conversion, auto_count
from cortiq_fcd.model.damage import damage_by_layer
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.ranks import Ranks
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.streaming import Room
from cortiq_fcd.model.untrained import untrained
from cortiq_fcd.model.windows import Ids, validation_offsets, windows
from cortiq_fcd.stages import dequantize, estimate
from cortiq_fcd.stages.config import PolishConfig, TrainConfig
from cortiq_fcd.stages.prepare import conversion_of, prepare
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.report import LayerCost

CALIBRATION_WINDOWS = 4


@dataclass(frozen=True)
class Choice:
    """The layers to convert, and what each that could be converted costs alone: KL to exact, nats a position."""

    layers: tuple[int, ...]
    damage: Mapping[int, float]

    def costs(self) -> list[LayerCost]:
        """What a report tells."""
        return [LayerCost(layer=i, kl=kl if math.isfinite(kl) else None) for i, kl in self.damage.items()]


def settle(
    model: CmfModel,
    out: Path,
    config: PolishConfig,
    device: torch.device,
    progress: Progress,
    protected: Iterable[Path],
    ranks: Ranks,
) -> tuple[PolishConfig, list[LayerCost] | None]:
    """The settings of a polish with the layers of `auto:N` by number, and the costs that chose them. Everything that
    `prepare` checks is checked before anything is measured; rank 0 measures for all.
    """
    count = auto_count(config.o1.layers)
    if count is None:
        return config, None
    possible = _possible(count, config, model)
    instead = _with_layers(config, possible.layers[-count:])
    job = prepare(model, out, instead, device, Progress(ignore), protected, ranks)
    estimate.check_fits(job.sizes, device, job.memory)
    layers: list[int] = []
    costs = None
    divided = ranks if job.sizes.sharding.model else None
    if ranks.rank == 0 or divided is not None:  # all must visit the layers of a divided model
        with progress.stage("dequantize", f"{len(job.plan.shapes)} tensors, {job.plan.params:,} weights"):
            room = Room(job.memory.room)
            weights = dequantize.run(model, job.plan, device, job.savings.streamed, room, divided)
        text, train = job.corpus.train, config.train
        offsets = validation_offsets(len(text), train.seq, CALIBRATION_WINDOWS)
        choice = run(count, untrained(weights, possible), text, offsets, train, progress)
        layers, costs = list(choice.layers), choice.costs()
    return _with_layers(config, json.loads(ranks.tell(json.dumps(layers)))), costs


def stand_in(model: AnyModel, config: PolishConfig, progress: Progress) -> PolishConfig:
    """The settings with the N deepest layers for `auto:N`, for a forecast and for checks, which measure nothing."""
    count = auto_count(config.o1.layers)
    if count is None:
        return config
    progress.warn(f"--o1 auto:{count} chooses when the polish begins; until then the {count} deepest layers stand in")
    return _with_layers(config, _possible(count, config, model).layers[-count:])


def run(count: int, network: Replica, text: Ids, offsets: list[int], train: TrainConfig, progress: Progress) -> Choice:
    """Choose `count` of the layers that the network's conversion names, by the windows of the text at `offsets`."""
    layers = network.conversion.layers
    check_count(count, network.conversion)
    totals = dict.fromkeys(layers, 0.0)
    with progress.stage("choose", f"{count} of {len(layers)} layers, each tried alone on {len(offsets)} windows"):
        for start in range(0, len(offsets), train.batch):
            some = offsets[start : start + train.batch]
            ids, _ = windows(text, some, train.seq, network.weights.embed.device)
            for layer, nats in damage_by_layer(network, ids, layers).items():
                totals[layer] += nats * len(some) / len(offsets)
    cheapest = sorted(layers, key=lambda layer: (totals[layer], layer))[:count]
    return Choice(tuple(sorted(cheapest)), totals)


def check_count(count: int, possible: Conversion) -> None:
    """ConfigError if the model has fewer layers that can be converted."""
    if count > len(possible.layers):
        raise ConfigError(
            f"--o1 auto:{count}: the model has {len(possible.layers)} layers that can be converted",
            hint=f"use --o1 auto:{len(possible.layers)} or fewer",
        )


def _possible(count: int, config: PolishConfig, model: AnyModel) -> Conversion:
    """The conversion of every layer that can be converted. ConfigError if they are fewer, or none is to be."""
    if config.train.polish_only:
        raise ConfigError(f"--o1 auto:{count}: --polish-only converts no layer", hint="name the layers to train")
    every = config.model_copy(update={"o1": config.o1.model_copy(update={"layers": "all"})})
    possible, _ = conversion_of(every, plan_model(model), model)
    check_count(count, possible)
    return possible


def _with_layers(config: PolishConfig, layers: Iterable[int]) -> PolishConfig:
    text = ",".join(map(str, layers))
    return config.model_copy(update={"o1": config.o1.model_copy(update={"layers": text})})
