"""Stage 1: every tensor of the file as f32, laid out as the products want it.

Each payload's hash is checked, and NaN or Inf ends the run here: training on such a model could only spread them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cortiq_fcd.errors import NonFiniteWeightsError
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.weights import FrozenWeights, load_weights


def run(model: CmfModel, plan: ModelPlan, device: torch.device) -> FrozenWeights:
    """Decode the tensors that the plan names. Raises CmfFormatError (damaged) or NonFiniteWeightsError, both exit 3."""

    def read(name: str) -> Tensor:
        values = model.decode(name)
        # A sum is not finite as soon as one element is not; it is the cheapest pass over the whole tensor.
        with np.errstate(invalid="ignore"):  # Inf - Inf is the NaN that is looked for, not a reason to warn
            total = values.sum(dtype=np.float64)
        if not np.isfinite(total):
            _refuse(model, name, values)
        return torch.from_numpy(values)

    return load_weights(plan, read, device)


def _refuse(model: CmfModel, name: str, values: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        index = [int(i) for i in np.unravel_index(bad[0], values.shape)]
        raise NonFiniteWeightsError(
            model.tensors[name].path,
            f"{len(bad)} of {values.size} weights are not finite, the first at {index}",
            tensor=name,
            expected="finite numbers",
            got=values.flat[bad[0]],
            hint="the model was damaged before or during conversion: convert it again from the original",
        )
