"""This process's place in a run of several, as torchrun tells it through the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Numbers of this process and of all, in the run and on this machine; how often torchrun started them again, and
    how often it would. `hosts_store`: what the ranks tell each other is gone when this process is.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int
    max_restarts: int
    hosts_store: bool = False

    @property
    def with_the_store(self) -> list[int]:
        """Ranks that are lost when what the ranks tell each other is: of the first machine, or the first one alone."""
        return list(range(self.local_world)) if self.is_spread and self.rank >= self.local_world else [0]

    @property
    def restarts_by_itself(self) -> bool:
        """Whether torchrun will start the run again if it ends now."""
        return self.restarts < self.max_restarts

    @property
    def is_spread(self) -> bool:
        """Whether the run has processes on other machines."""
        return self.local_world < self.world

    @property
    def launcher(self) -> list[str]:
        """The words that start such a run, up to this program's own."""
        return ["torchrun", "--nproc-per-node", str(self.local_world), "-m", "cortiq_fcd"]


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process; null when it is alone."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(environment.get(name) for name in needed):
        return None

    def number(name: str, default: int) -> int:
        try:
            return int(environment[name])
        except (KeyError, ValueError):
            return default

    rank, world = number("RANK", 0), number("WORLD_SIZE", 1)
    if world < 2:
        return None
    return Place(
        rank,
        world,
        number("LOCAL_RANK", rank),
        number("LOCAL_WORLD_SIZE", world),
        number("TORCHELASTIC_RESTART_COUNT", 0),
        number("TORCHELASTIC_MAX_RESTARTS", 0),
        rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
