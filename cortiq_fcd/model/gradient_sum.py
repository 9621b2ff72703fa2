"""The sum of all ranks' gradients, sent in buckets while the backward is still at work further down.

The backward fills the flat gradient from its end to its beginning. A bucket is sent as soon as it is full: part r of it
goes from every rank to rank r, which adds the parts up in the order of the ranks; then the sums go back to everyone.
What was sent, and in which order it was added, is the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_fcd.model.ranks import Pending, Ranks

BUCKET_ELEMENTS = 1 << 24  # of f32: 64 MiB


class GradientSum:
    """The mean of the ranks' gradients, in place in flat `gradient` (a multiple of `ranks.world` long)."""

    def __init__(
        self, gradient: Tensor, ranks: Ranks, *, scatter_only: bool = False, bucket_elements: int = BUCKET_ELEMENTS
    ) -> None:
        """`scatter_only`: each rank ends with the sums of its own part of every bucket, and nothing more is sent."""
        self._ranks, self._scatter_only = ranks, scatter_only
        self.buckets = bucket_views(gradient, ranks.world, bucket_elements)
        self._stops = [int(bucket.storage_offset()) for bucket in self.buckets]
        self._sent = 0
        self._exchanging: tuple[Tensor, Tensor, Pending] | None = None
        self._collecting: list[Pending] = []

    def filled_down_to(self, offset: int) -> None:
        """Say that the gradient is final from element `offset` on; sends the buckets that are full."""
        while self._sent < len(self.buckets) and self._stops[self._sent] >= offset:
            self._settle()
            bucket = self.buckets[self._sent]
            received = torch.empty(self._ranks.world, len(bucket) // self._ranks.world).to(bucket)
            self._exchanging = bucket, received, self._ranks.exchange(bucket, received)
            self._sent += 1

    def finish(self) -> None:
        """Until every bucket holds its means; ready for the next step."""
        self.filled_down_to(0)
        self._settle()
        for pending in self._collecting:
            pending.wait()
        self._collecting, self._sent = [], 0

    def _settle(self) -> None:
        """Add up the bucket that was sent last. In the program's order, since all ranks must send in the same one."""
        if self._exchanging is None:
            return
        bucket, received, pending = self._exchanging
        self._exchanging = None
        pending.wait()
        own = own_part(bucket, self._ranks)
        torch.add(received[0], received[1], out=own)
        for part in received[2:]:
            own.add_(part)
        own.div_(self._ranks.world)
        if not self._scatter_only:
            self._collecting.append(self._ranks.collect(own, bucket))


def bucket_views(flat: Tensor, world: int, bucket_elements: int = BUCKET_ELEMENTS) -> list[Tensor]:
    """Pieces of `flat` from its end to its beginning, each a multiple of `world` long, as `flat` itself must be."""
    size = max(world, bucket_elements // world * world)
    first = len(flat) % size or size
    return list(reversed(torch.split(flat, [first, *[size] * ((len(flat) - first) // size)])))


def sent_bytes(weights: int, world: int) -> int:
    """What each of `world` ranks sends for the gradient of so many f32 weights: the parts, and its own sums."""
    part = -(-weights // world)
    return 2 * (world - 1) * part * 4


def own_part(bucket: Tensor, ranks: Ranks) -> Tensor:
    """The part of a bucket that this rank adds up."""
    return bucket.chunk(ranks.world)[ranks.rank]
