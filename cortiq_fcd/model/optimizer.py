"""The optimizers of a replica's masters: whole on every rank, or divided over the ranks. Their numbers are the same."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.io.tensor_file import StoredVector
from cortiq_fcd.model.adamw import Moments, adamw_step, new_moments, sum_of_squares
from cortiq_fcd.model.gradient_sum import BUCKET_ELEMENTS, GradientSum, bucket_views, own_part
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.stored_moments import StoredMoments
from cortiq_fcd.model.vectors import Gathered, Held, Vector, deal_out, hand_out, read_vector


class Optimizer:
    """AdamW over all masters of a replica, whose gradient is averaged over the ranks first."""

    def __init__(
        self,
        replica: Replica,
        ranks: Ranks = ALONE,
        moments: StoredMoments | None = None,
        *,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`moments`: those to go on with, on disk; null: new ones in memory."""
        self.ranks = ranks
        self.masters = replica.masters.flat
        self.moments = moments or new_moments(self.masters)
        self._average = _Average(replica, ranks, bucket_elements, scatter_only=False)
        self._gradient = replica.gradient.flat

    def layer_done(self, layer: int) -> None:
        """Say that a layer's gradient is final, and so is every one above it."""
        self._average.layer_done(layer)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, once the backward is over."""
        return self._average.norm()

    def step(self, lr: float, norm: float) -> None:
        """Update the masters. `norm`: of the gradient, before clipping."""
        adamw_step(self.masters, self._gradient, self.moments, lr, norm)

    def skip(self) -> None:
        """Take no step: masters and moments stay as they are."""

    def restore(self, masters: Held) -> None:
        """Put other numbers into the masters, such as those of a best state."""
        read_vector(masters, self.masters)

    def resume(self, masters: Vector, first: Vector, second: Vector, steps: int) -> None:
        """Go on after so many steps with masters and moments that rank 0 has."""
        hand_out(masters, self.masters, self.ranks)
        if isinstance(self.moments, Moments):  # on disk they are what they were
            hand_out(first, self.moments.first, self.ranks)
            hand_out(second, self.moments.second, self.ranks)
        self.moments.steps = steps

    def received(self, vector: Vector) -> Held:
        """What this rank keeps of a best state that rank 0 has."""
        if self.ranks.world == 1 and isinstance(vector, Tensor | StoredVector):
            return vector  # it may stay in its file
        out = torch.empty_like(self.masters)
        hand_out(vector, out, self.ranks)
        return out

    def saved(self, values: Held) -> Vector:
        """Masters, moments or a best state, as a checkpoint takes them."""
        return values


class ShardedOptimizer:
    """The same, with masters and moments divided: part r of every bucket of the gradient is the business of rank r.

    The replica's masters are then copies, gathered behind every step; the gradient may be written over them.
    """

    def __init__(self, replica: Replica, ranks: Ranks, *, bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self.ranks = ranks
        self._count = len(replica.masters.flat)
        self._average = _Average(replica, ranks, bucket_elements, scatter_only=True)
        self._buckets = bucket_views(replica.masters.padded, ranks.world, bucket_elements)
        self.masters = torch.cat([own_part(bucket, ranks) for bucket in self._buckets])
        self.moments = new_moments(self.masters)

    def layer_done(self, layer: int) -> None:
        """Say that a layer's gradient is final, and so is every one above it."""
        self._average.layer_done(layer)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, once the backward is over."""
        return self._average.norm()

    def step(self, lr: float, norm: float) -> None:
        """Update the masters, and gather them. `norm`: of the gradient, before clipping."""
        own = (self._parts(values) for values in (self.masters, self.moments.first, self.moments.second))
        pending = []
        for bucket, gradient, masters, first, second in zip(self._buckets, self._average.parts, *own, strict=True):
            adamw_step(masters, gradient, Moments(first, second, self.moments.steps), lr, norm)
            pending.append(self.ranks.collect(masters, bucket))
        self.moments.steps += 1
        for transfer in pending:
            transfer.wait()

    def skip(self) -> None:
        """Take no step: masters and moments stay as they are. Gathers them: the gradient was written over copies."""
        for bucket, masters in zip(self._buckets, self._parts(self.masters), strict=True):
            self.ranks.collect(masters, bucket).wait()

    def restore(self, masters: Held) -> None:
        """Put other numbers into the masters, such as those of a best state."""
        read_vector(masters, self.masters)
        self.skip()

    def resume(self, masters: Vector, first: Vector, second: Vector, steps: int) -> None:
        """Go on after so many steps with masters and moments that rank 0 has."""
        for vector, out in ((masters, self.masters), (first, self.moments.first), (second, self.moments.second)):
            deal_out(vector, self._parts(out)[::-1], self.ranks)
        self.moments.steps = steps
        self.skip()

    def received(self, vector: Vector) -> Held:
        """What this rank keeps of a best state that rank 0 has."""
        out = torch.empty_like(self.masters)
        deal_out(vector, self._parts(out)[::-1], self.ranks)
        return out

    def saved(self, values: Held) -> Vector:
        """Masters, moments or a best state, as a checkpoint takes them."""
        assert isinstance(values, Tensor)
        return Gathered(self._parts(values)[::-1], self._count, self.ranks)

    def _parts(self, values: Tensor) -> list[Tensor]:
        """Of this rank's masters or moments, what belongs to each bucket."""
        return list(torch.split(values, [len(bucket) // self.ranks.world for bucket in self._buckets]))


AnyOptimizer: TypeAlias = Optimizer | ShardedOptimizer


class _Average:
    """The gradient, averaged over the ranks. `parts`: what this rank averages of it, bucket by bucket."""

    def __init__(self, replica: Replica, ranks: Ranks, bucket_elements: int, *, scatter_only: bool) -> None:
        gradient = replica.gradient
        self._layers, self._ranks = gradient.layers, ranks
        self._sum = None
        self.parts = [gradient.flat]
        if ranks.world > 1:
            self._sum = GradientSum(gradient.padded, ranks, scatter_only=scatter_only, bucket_elements=bucket_elements)
            self.parts = [own_part(bucket, ranks) for bucket in self._sum.buckets]

    def layer_done(self, layer: int) -> None:
        if self._sum is not None:
            self._sum.filled_down_to(int(self._layers[layer].input_norm.storage_offset()))

    def norm(self) -> float:
        if self._sum is not None:
            self._sum.finish()
        return math.sqrt(self._ranks.sum([sum(map(sum_of_squares, self.parts))])[0])
