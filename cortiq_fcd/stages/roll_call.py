"""Who is still there: every rank says in the shared store that it lives, and why it leaves.

A broken connection tells that some rank is gone, but not which: the survivors ask the store. A rank whose machine has
vanished breaks no connection: it is missed because it stopped saying that it lives.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.stages.group import Store
from cortiq_fcd.stages.launch import Place

EVERY_S = 2.0
SILENT_S = 40.0  # then a rank is lost; TIMEOUT sets another
TIMEOUT = "CORTIQ_RANK_TIMEOUT"  # environment variable
STARTING_S = 300.0  # the same for one that has not been heard of yet
ANSWER_S = 4.0  # a living rank that leaves says so within this time


def silence_s() -> float:
    """How long a rank may be silent. ConfigError for what is no number of seconds."""
    said = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(said) if said else SILENT_S
    except ValueError:
        seconds = 0.0
    if not EVERY_S <= seconds < 1e6:
        raise ConfigError(
            f"{TIMEOUT}={said}: is not a number of seconds", hint=f"{EVERY_S:g} or more; {SILENT_S:g} is the default"
        )
    return seconds


@dataclass(frozen=True)
class Farewell:
    """Why a rank left: its exit code and, if it met an error of its own, that."""

    code: int
    message: str = ""
    hint: str = ""


class RollCall:
    """What the ranks say through the store."""

    def __init__(self, store: Store, place: Place) -> None:
        self._store, self._place = store, place
        self.others = [rank for rank in range(place.world) if rank != place.rank]

    def leave(self, farewell: Farewell) -> None:
        """Say why this rank leaves."""
        self._store.set(f"left/{self._place.rank}", json.dumps(asdict(farewell)))

    def left(self, rank: int) -> Farewell | None:
        """What a rank said when it left; null: it is there, or it was killed."""
        key = f"left/{rank}"
        return Farewell(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def farewells(self, ranks: list[int]) -> dict[int, Farewell]:
        """What these ranks said, once all have, or have had the time to."""
        self._wait([f"left/{rank}" for rank in ranks])
        return {rank: farewell for rank in ranks if (farewell := self.left(rank)) is not None}

    def hear(self) -> None:
        """Say that this rank has heard what it wanted to hear."""
        self._store.set(f"heard/{self._place.rank}", "")

    def wait_until_heard(self) -> None:
        """Until the others have heard all, or have had the time to: what they read ends with this process."""
        self._wait([f"heard/{rank}" for rank in self.others])

    def _wait(self, keys: list[str]) -> None:
        until = time.monotonic() + ANSWER_S
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)


class Watch(threading.Thread):
    """Says that this rank lives, and calls `on_lost` with the ranks that were not heard of for too long.

    Silence is counted in looks, not by a clock, which would go on while all ranks are suspended together.
    """

    def __init__(self, store: Store, place: Place, on_lost: Callable[[list[int]], None]) -> None:
        super().__init__(daemon=True)
        self._store, self._roll = store, RollCall(store, place)
        self._place, self._on_lost = place, on_lost
        self._silence_s = silence_s()
        # Of each rank: its last sign of life, and how often this rank has looked since.
        self._heard: dict[int, tuple[bytes, int]] = dict.fromkeys(self._roll.others, (b"", 0))
        self._rounds = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `end`."""
        threading.Thread(target=self._watch_the_store, daemon=True).start()
        while not self._ended.wait(EVERY_S if self._rounds else 0):
            self._rounds += 1
            try:
                self._store.set(f"lives/{self._place.rank}", str(self._rounds))
                lost = [rank for rank in self._roll.others if self._is_lost(rank)]
            except RuntimeError:  # the store is gone, and with it the process that started rank 0
                lost = self._place.with_the_store
            if lost:
                self._tell(lost)
                return

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch_the_store(self) -> None:
        """A store whose machine is gone never answers: then no round ends."""
        seen, looks = 0, 0
        while not self._ended.wait(EVERY_S):
            seen, looks = (seen, looks + 1) if self._rounds == seen else (self._rounds, 0)
            if looks * EVERY_S > self._silence_s:
                self._tell(self._place.with_the_store)
                return

    def _tell(self, lost: list[int]) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_lost(lost)

    def _is_lost(self, rank: int) -> bool:
        key = f"lives/{rank}"
        sign = self._store.get(key) if self._store.check([key]) else b""
        last, looks = self._heard[rank]
        self._heard[rank] = (sign, 0) if sign != last else (last, looks + 1)
        silent = self._heard[rank][1] * EVERY_S > (self._silence_s if sign else STARTING_S)
        return silent and self._roll.left(rank) is None
