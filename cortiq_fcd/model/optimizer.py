"""The optimizer of a replica's masters, for one process and for several."""

from __future__ import annotations

from cortiq_fcd.model.adamw import Moments, adamw_step, gradient_norm, new_moments
from cortiq_fcd.model.gradient_sum import BUCKET_ELEMENTS, GradientSum
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.stored_moments import StoredMoments


class Optimizer:
    """AdamW over all masters of a replica, whose gradient is averaged over the ranks first."""

    def __init__(
        self,
        replica: Replica,
        ranks: Ranks = ALONE,
        moments: Moments | StoredMoments | None = None,
        *,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`moments`: those to go on with."""
        self.ranks = ranks
        self.moments = moments or new_moments(replica.masters.flat)
        self._masters, self._gradient = replica.masters, replica.gradient
        self._sum = None
        if ranks.world > 1:
            self._sum = GradientSum(replica.gradient.padded, ranks, bucket_elements=bucket_elements)

    def layer_done(self, layer: int) -> None:
        """Say that a layer's gradient is final, and so is every one above it."""
        if self._sum is not None:
            self._sum.filled_down_to(int(self._gradient.layers[layer].input_norm.storage_offset()))

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, once the backward is over."""
        if self._sum is not None:
            self._sum.finish()
        return gradient_norm(self._gradient.flat)

    def step(self, lr: float, norm: float) -> None:
        """Update the masters. `norm`: of the gradient, before clipping."""
        adamw_step(self._masters.flat, self._gradient.flat, self.moments, lr, norm)
