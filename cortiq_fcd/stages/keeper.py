"""When the polish loop's state is saved: behind every validation, every so many minutes, and when asked to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.vectors import Gathered
from cortiq_fcd.stages.artefacts import Before, TrainingState
from cortiq_fcd.stages.checkpoint import Checkpoints
from cortiq_fcd.stages.interrupt import Interrupted, Interruption


class CheckpointKeeper:
    """An `artefacts.Keeper` that writes checkpoints. One that can't be written is a warning: training goes on."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        before: Before,
        every_minutes: float,
        interruption: Interruption,
        warn: Callable[[str], None],
        ranks: Ranks = ALONE,
        *,
        copies: bool = True,
    ) -> None:
        self._checkpoints, self._before, self._interruption, self._warn = checkpoints, before, interruption, warn
        self._ranks = ranks
        self._stop: int | None = None  # the signal that all ranks have agreed to follow
        self._every_s = every_minutes * 60
        self._last_s = time.monotonic()  # a clock that nobody sets
        self._writing: int | None = None
        self._copies = copies

    def wants(self, *, evaluated: bool) -> bool:
        """Whether it is time: by the clock of rank 0, or because any rank was asked to stop."""
        asked, late = self._interruption.requested, time.monotonic() - self._last_s >= self._every_s
        flags = [asked == signal.SIGTERM, asked is not None, late and self._ranks.rank == 0]
        terminate, stop, due = (total > 0 for total in self._ranks.sum(flags))
        self._stop = (signal.SIGTERM if terminate else signal.SIGINT) if stop else None
        return evaluated or stop or due

    def keep(self, state: TrainingState) -> None:
        """Have the state written: a copy in the background, or itself at once where there is no room for `copies` or it
        lies on several ranks.

        Raises Interrupted, with the state on disk, when asked to stop.
        """
        self.finish()
        self._writing = state.record.step
        vectors = (state.masters, state.first, state.second, state.best)
        divided = [vector for vector in vectors if isinstance(vector, Gathered)]
        if self._ranks.rank == 0:
            self._checkpoints.save(state, self._before, copies=self._copies and not divided)
        for vector in divided:  # what rank 0 has not asked for: all of it on other ranks, or where it could not write
            vector.drain()
        self._last_s = time.monotonic()
        if self._stop is not None:
            self.finish()
            self._ranks.sum([0])  # until rank 0 has written it
            raise Interrupted(self._stop, self._interruption.saved_step)

    def finish(self) -> None:
        """Until what is being written is written."""
        try:
            self._checkpoints.wait()
        except ResourceError as error:
            last = self._checkpoints.saved_step
            kept = "there is none" if last is None else f"the last whole one is of step {last}"
            self._warn(f"the checkpoint of step {self._writing} could not be saved ({error.message}); {kept}")
        self._interruption.saved_step = self._checkpoints.saved_step
