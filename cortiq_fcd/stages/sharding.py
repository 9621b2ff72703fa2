"""What of a run is divided over the processes that share it."""

from __future__ import annotations

from dataclasses import dataclass

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.stages.config import ComputeConfig, PolishConfig


@dataclass(frozen=True)
class Sharding:
    """The number of processes, here and in all, and whether they divide the optimizer and the frozen model."""

    world: int = 1
    local_world: int = 1
    optimizer: bool = False
    model: bool = False

    def __str__(self) -> str:
        """In words, for a log."""
        divided = ["windows", *["optimizer"] * self.optimizer, *["model"] * self.model]
        return f"{self.world} processes divide {', '.join(divided)}"


UNDIVIDED = Sharding()


def sharding(config: ComputeConfig, ranks: Ranks = ALONE) -> Sharding:
    """What is divided. One process divides nothing, whatever it is told."""
    several = ranks.world > 1
    return Sharding(ranks.world, ranks.local_world, several and config.shard_optimizer, several and config.shard_model)


def check_sharding(config: PolishConfig, ranks: Ranks) -> None:
    """ConfigError for parts of a recipe that need the whole gradient or all masters on every process."""
    train = config.train
    if ranks.world == 1 or not config.compute.shard_optimizer:
        return
    parts = {"--clip layer": train.clip == "layer", "--norm-lr": train.norm_lr != 1, "--ema": train.ema > 0}
    for flag, is_on in parts.items():
        if is_on:
            raise ConfigError(
                f"--shard-optimizer: does not go together with {flag}, which needs all masters in every process",
                hint=f"leave out one of them, or switch {flag.split()[0]} off where --recipe sets it",
            )


def idle_options(config: ComputeConfig, ranks: Ranks) -> list[str]:
    """Notes on options that one process alone can't follow."""
    asked = {"--shard-optimizer": config.shard_optimizer, "--shard-model": config.shard_model}
    idle = [flag for flag, on in asked.items() if on and ranks.world == 1]
    return [f"{flag} does nothing in one process; torchrun starts several" for flag in idle]
