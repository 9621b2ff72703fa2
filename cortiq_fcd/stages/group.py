"""The ranks of a run, connected through torch.distributed: gloo between CPUs, nccl between CUDA devices.

The only module that knows torch.distributed. A connection that breaks is a LostRankError, whatever was being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cortiq_fcd.errors import LostRankError
from cortiq_fcd.model.ranks import Pending
from cortiq_fcd.stages.interrupt import hear_no_signals
from cortiq_fcd.stages.launch import Place

T = TypeVar("T")
# A rank may take long between two transfers. Ones that are gone are noticed otherwise; see `roll_call`.
PATIENCE = timedelta(days=7)
MEETING = timedelta(minutes=5)


class Store(Protocol):
    """A dictionary that all ranks share, and that outlives each of them."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read what was written; waits for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these were written."""


def meet(name: str) -> Store:
    """A connection of its own to the store of the run, for keys that begin with `name`. LostRankError without one."""

    def connect() -> Store:
        store, _, _ = next(rendezvous("env://", timeout=MEETING))
        return cast("Store", PrefixStore(name, store))

    return _attempt(connect)


class Group:
    """A `model.ranks.Ranks` of several processes."""

    def __init__(self, place: Place) -> None:
        """Connect to the others. LostRankError if they can't be reached."""
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.sent_bytes = 0  # by this rank, without headers
        store = cast("Any", meet(f"transfers/{place.restarts}"))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        _attempt(
            lambda: dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world, timeout=PATIENCE
            )
        )

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in f64."""
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        self.sent_bytes += own.nbytes * (self.world - 1)
        _attempt(lambda: dist.all_gather(everyone, own))
        total = everyone[0]
        for others in everyone[1:]:
            total = total + others
        return cast("list[float]", total.tolist())

    def tell(self, text: str) -> str:
        """The text of rank 0."""
        payload = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        self.spread(size)
        if self.rank:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self.spread(payload)
        return bytes(payload.tolist()).decode()

    def spread(self, values: Tensor) -> None:
        """Overwrite `values` by those of rank 0."""
        if values.numel():
            self.sent_bytes += values.nbytes * (self.world - 1) if self.rank == 0 else 0
            _attempt(lambda: dist.broadcast(values, src=0))

    def exchange(self, parts: Tensor, out: Tensor) -> Pending:
        """Send part r of `parts` to rank r; `out` [world, n] gets what each rank sent here."""
        self.sent_bytes += parts.nbytes // self.world * (self.world - 1)
        return _Transfer(lambda: dist.all_to_all_single(out.view(-1), parts, async_op=True))

    def collect(self, part: Tensor, out: Tensor) -> Pending:
        """`out` [world * n] gets the `part` [n] of every rank."""
        self.sent_bytes += part.nbytes * (self.world - 1)
        return _Transfer(lambda: dist.all_gather(list(out.chunk(self.world)), part, async_op=True))

    def gather(self, part: Tensor, out: Tensor | None) -> None:
        """`out` [world * n], given on rank 0 alone, gets the `part` [n] of every rank."""
        self.sent_bytes += part.nbytes if self.rank else 0
        places = None if out is None else list(out.chunk(self.world))
        _attempt(lambda: dist.gather(part, places, dst=0))

    def deal(self, parts: Tensor | None, out: Tensor) -> None:
        """`out` [n] gets its part of `parts` [world * n], which are given on rank 0 alone."""
        self.sent_bytes += 0 if self.rank else out.nbytes * (self.world - 1)
        _attempt(lambda: dist.scatter(out, None if parts is None else list(parts.chunk(self.world)), src=0))

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Overwrite `values` by those of rank `source`."""
        self.sent_bytes += values.nbytes * (self.world - 1) if self.rank == source else 0
        return _Transfer(lambda: dist.broadcast(values, src=source, async_op=True))


class _Transfer:
    """A transfer under way."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._work = _attempt(start)

    def wait(self) -> None:
        """Until it is done."""
        _attempt(self._work.wait)


def _attempt(transfer: Callable[[], T]) -> T:
    try:
        return transfer()
    except RuntimeError as error:
        hear_no_signals()
        raise LostRankError(f"the connection to another rank broke ({str(error).splitlines()[0]})") from error
