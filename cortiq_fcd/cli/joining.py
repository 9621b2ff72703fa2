"""A command of one process or of several, and how it ends: rank 0 tells what happened on any rank, others are silent.

Every rank that leaves early says why in a store that all share. One that is missing there was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cortiq_fcd.cli import answer_signals
from cortiq_fcd.cli.signals import Terminated
from cortiq_fcd.errors import ConfigError, CortiqError, LostRankError, RankEndedError
from cortiq_fcd.stages.interrupt import Interrupted, Interruption, hear_no_signals
from cortiq_fcd.stages.launch import Place, place

if TYPE_CHECKING:
    from cortiq_fcd.model.ranks import Ranks
    from cortiq_fcd.stages.roll_call import Farewell, RollCall

BUG = 1


@contextlib.contextmanager
def joined(
    here: Place | None,
    interruption: Interruption,
    expected: Callable[[Exception], CortiqError | None],
    tell: Callable[[LostRankError], object],
) -> Iterator[Ranks]:
    """The ranks of this run, connected; one alone when `here` is null.

    `expected` turns exceptions that are the user's to solve into errors. `tell` shows the loss of a rank when nothing
    else can any more: this rank is waiting for one that does not answer. Whatever ends the block is raised on the rank
    that is to tell it; the others raise RankEndedError.
    """
    from cortiq_fcd.model.ranks import ALONE

    if here is None:
        yield ALONE
        return
    from cortiq_fcd.stages.group import Group, meet
    from cortiq_fcd.stages.roll_call import Farewell, RollCall, Watch, silence_s

    try:
        silence_s()
    except ConfigError as error:
        if not here.rank:
            raise
        raise RankEndedError(error.exit_code) from error  # every rank was given the same
    roll = RollCall(meet(f"roll/{here.restarts}"), here)

    def end(lost: list[int]) -> None:
        hear_no_signals()
        if here.rank == min(rank for rank in range(here.world) if rank not in lost):
            tell(_lost(lost, here, interruption))
            sys.stderr.flush()
        os._exit(LostRankError.exit_code)

    watch = Watch(meet(f"roll/{here.restarts}"), here, end)
    watch.start()
    if here.rank:
        answer_signals(lambda number, _: os._exit(128 + number))
    try:
        yield Group(here)
    except BaseException as error:
        hear_no_signals()
        watch.end()
        known = expected(error) if isinstance(error, Exception) and not isinstance(error, CortiqError) else None
        ending = _ending(known or error, roll, here, interruption)
        with contextlib.suppress(RuntimeError):
            roll.wait_until_heard() if here.hosts_store else roll.hear()
        raise ending from error
    watch.end()
    roll.leave(Farewell(0))


def refuse_several(command: str) -> None:
    """ConfigError, told by one process, if torchrun started several for a command that can't share its work."""
    here = place()
    if here is None:
        return
    if here.rank:
        raise RankEndedError(ConfigError.exit_code)
    then = "; torchrun can polish what it writes" if command == "convert" else ""
    raise ConfigError(
        f"{command}: {here.world} processes were started, and only polish shares its work among them",
        hint=f"give the command without torchrun{then}",
    )


def silent() -> bool:
    """What a rank shows when it is asked to stop: nothing, and that is all there is to show."""
    return True


def _ending(error: BaseException, roll: RollCall, here: Place, interruption: Interruption) -> BaseException:
    """What to raise here for an error that ended the block."""
    own = _farewell(error)
    try:
        roll.leave(own)
        before = roll.farewells(list(range(here.rank)))
        if any(rank in before for rank in range(here.rank)):  # one of a lower number tells
            return error if own.code == BUG else RankEndedError(own.code)
        if own.message:
            return error
        said = roll.farewells(roll.others)
    except RuntimeError:  # the store is gone with the process that started rank 0
        return error if own.message or not here.rank else _lost(here.with_the_store, here, interruption)
    missing = [rank for rank in roll.others if rank not in said]
    if missing:
        return _lost(missing, here, interruption)
    for rank, farewell in said.items():
        if farewell.message:
            message = f"rank {rank} of {here.world} stopped: {farewell.message}"
            return LostRankError(message, hint=farewell.hint, saved_step=interruption.saved_step)
    if isinstance(error, LostRankError):
        error.saved_step = interruption.saved_step
    return error


def _farewell(error: BaseException) -> Farewell:
    """What this rank says; no message when the cause is not its own."""
    from cortiq_fcd.stages.roll_call import Farewell

    if isinstance(error, LostRankError):
        return Farewell(error.exit_code)
    if isinstance(error, CortiqError):
        return Farewell(error.exit_code, error.message, error.hint)
    if isinstance(error, Interrupted):
        return Farewell(128 + signal.SIGTERM if error.signal == signal.SIGTERM else 128 + signal.SIGINT)
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        return Farewell(128 + signal.SIGTERM if isinstance(error, Terminated) else 128 + signal.SIGINT)
    return Farewell(BUG, f"{type(error).__name__}: {error} (a bug; its traceback is above)")


def _lost(ranks: list[int], here: Place, interruption: Interruption) -> LostRankError:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {here.world}"
    are = "are" if len(ranks) > 1 else "is"
    return LostRankError(
        f"{who} {are} gone without a word: killed, or the machine is down", saved_step=interruption.saved_step
    )
