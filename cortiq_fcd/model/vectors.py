"""Long vectors of masters or moments: in memory, in a file, in parts on the ranks, or on rank 0 alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.io.tensor_file import F32, StoredVector
from cortiq_fcd.model.ranks import Ranks

PIECE = 1 << 24  # numbers that are sent at a time


class Gathered:
    """`count` numbers whose parts lie on the ranks. All ranks ask for the pieces together; rank 0 gets the numbers."""

    def __init__(self, parts: list[Tensor], count: int, ranks: Ranks) -> None:
        """`parts`: this rank's part of each bucket, from the beginning of the vector on."""
        self._parts, self._ranks = parts, ranks
        self.count = count
        self.nbytes = 4 * count
        self._next = 0  # part to be sent

    def pieces(self) -> Iterator[F32]:
        """The numbers on rank 0, bucket by bucket, in one buffer that each piece overwrites; nothing on other ranks."""
        most = max(map(len, self._parts), default=0)
        is_first = self._ranks.rank == 0
        buffer = self._parts[0].new_empty(most * self._ranks.world) if is_first and self._parts else None
        done = 0
        while self._next < len(self._parts):
            part = self._parts[self._next]
            self._next += 1
            bucket = None if buffer is None else buffer[: len(part) * self._ranks.world]
            self._ranks.gather(part, bucket)
            if bucket is not None:
                yield bucket[: self.count - done].cpu().numpy()
                done += len(bucket)

    def drain(self) -> None:
        """Send what has not been asked for, so that no rank waits for another."""
        for _ in self.pieces():
            pass


@dataclass(frozen=True)
class OnRank0:
    """`count` numbers that rank 0 has."""

    count: int


Held: TypeAlias = Tensor | StoredVector
"""Numbers [P] that this process can read."""

Vector: TypeAlias = Held | Gathered | OnRank0
"""Numbers [P], wherever they are."""


def count(vector: Vector) -> int:
    """How many numbers."""
    return len(vector) if isinstance(vector, Tensor) else vector.count


def read_vector(vector: Held, out: Tensor | None = None) -> Tensor:
    """The numbers of a vector, into `out` where given. ResourceError if its file has gone bad."""
    if isinstance(vector, Tensor):
        return vector if out is None else out.copy_(vector)
    if out is None:
        out = torch.empty(vector.count)
    at = 0
    try:
        for piece in vector.pieces():
            out[at : at + piece.size].copy_(torch.from_numpy(piece))
            at += piece.size
    except (OSError, ValueError) as error:
        raise ResourceError(f"{vector.path}: can't be read back ({error})") from error
    return out


def hand_out(vector: Vector, out: Tensor, ranks: Ranks) -> None:
    """Give every rank, in `out`, all numbers of a vector that rank 0 has."""
    at = 0
    for piece in torch.split(out, PIECE):
        if isinstance(vector, Tensor | StoredVector):
            read_vector(_section(vector, at, len(piece)), piece)
        ranks.spread(piece)
        at += len(piece)


def deal_out(vector: Vector, parts: list[Tensor], ranks: Ranks) -> None:
    """Give every rank its part of each bucket of a vector that rank 0 has; what lies behind the vector's end is 0."""
    if not isinstance(vector, Tensor | StoredVector):
        for part in parts:
            ranks.deal(None, part)
        return
    buffer = parts[0].new_empty(max(map(len, parts)) * ranks.world)
    at = 0
    for part in parts:
        bucket = buffer[: len(part) * ranks.world].zero_()
        there = min(len(bucket), count(vector) - at)
        read_vector(_section(vector, at, there), bucket[:there])
        ranks.deal(bucket, part)
        at += there


def _section(vector: Held, start: int, length: int) -> Held:
    if isinstance(vector, Tensor):
        return vector[start : start + length]
    return replace(vector, offset_bytes=vector.offset_bytes + 4 * start, count=length)
