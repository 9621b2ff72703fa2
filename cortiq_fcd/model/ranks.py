"""The processes that train together, as the training code sees them. A process alone is the case of one rank.

Every rank calls the same methods in the same order. Sums are taken in the order of the ranks, so that they are the same
on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Pending(Protocol):
    """A transfer under way; its tensors may not be touched before `wait` has returned."""

    def wait(self) -> object:
        """Until it is done."""


class Ranks(Protocol):
    """This process's place among the others, and what can be sent between them."""

    @property
    def rank(self) -> int:
        """Number of this process; 0 writes and shows progress."""

    @property
    def world(self) -> int:
        """Number of processes."""

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""

    @property
    def local_world(self) -> int:
        """Number of processes on this machine."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in f64."""

    def tell(self, text: str) -> str:
        """The text of rank 0."""

    def spread(self, values: Tensor) -> None:
        """Overwrite `values` by those of rank 0."""

    def exchange(self, parts: Tensor, out: Tensor) -> Pending:
        """Send part r of contiguous `parts` [world * n] to rank r; `out` [world, n] gets what each rank sent here."""

    def collect(self, part: Tensor, out: Tensor) -> Pending:
        """`out` [world * n] gets the `part` [n] of every rank; `part` may be this rank's place in `out`."""

    def gather(self, part: Tensor, out: Tensor | None) -> None:
        """`out` [world * n], given on rank 0 alone, gets the `part` [n] of every rank."""

    def deal(self, parts: Tensor | None, out: Tensor) -> None:
        """`out` [n] gets its part of `parts` [world * n], which are given on rank 0 alone."""

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Overwrite `values` by those of rank `source`."""


class _Done:
    def wait(self) -> None:
        pass


class Alone:
    """One process: nothing is sent."""

    rank, world, local_rank, local_world = 0, 1, 0, 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def tell(self, text: str) -> str:
        """The text."""
        return text

    def spread(self, values: Tensor) -> None:
        """Nothing to do."""

    def exchange(self, parts: Tensor, out: Tensor) -> Pending:
        """Copy."""
        out.view(-1).copy_(parts)
        return _Done()

    def collect(self, part: Tensor, out: Tensor) -> Pending:
        """Copy."""
        out.copy_(part)
        return _Done()

    def gather(self, part: Tensor, out: Tensor | None) -> None:
        """Copy."""
        assert out is not None
        out.copy_(part)

    def deal(self, parts: Tensor | None, out: Tensor) -> None:
        """Copy."""
        assert parts is not None
        out.copy_(parts)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Nothing to do."""
        return _Done()


ALONE = Alone()


def share(ranks: Ranks, items: Sequence[T]) -> Sequence[T]:
    """This rank's part of `items`: contiguous, in order, and as long as the others' to within one item."""
    return items[len(items) * ranks.rank // ranks.world : len(items) * (ranks.rank + 1) // ranks.world]
