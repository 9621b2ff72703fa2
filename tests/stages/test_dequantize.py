"""Tensors of a file as the products want them, and what stops a polish before it starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cortiq_fcd.errors import CmfFormatError, NonFiniteWeightsError
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.replica import Replica, hidden_states, new_replica
from cortiq_fcd.model.weights import FrozenWeights
from cortiq_fcd.stages import dequantize
from tests.fixtures import Tiny, tensors_in, write_arrays

CPU = torch.device("cpu")
SETTING = Conversion((0, 1, 2), "all", m=6, w=5, sink=2, seal=20)


def loaded(path: Path) -> FrozenWeights:
    with open_model(path) as model:
        return dequantize.run(model, plan_model(model), CPU)


def hidden(weights: FrozenWeights) -> torch.Tensor:
    replica: Replica = new_replica(weights, SETTING)
    return hidden_states(replica, torch.arange(20)[None], student=False)


@pytest.mark.parametrize("model", [Tiny(), Tiny(tied=False, biases="qkvo", qk_norm=False), Tiny(biases="v")], ids=repr)
def test_a_file_gives_the_weights_that_were_written(model: Tiny, tmp_path: Path) -> None:
    weights = loaded(model.write(tmp_path / "model.cmf"))
    expected = model.weights()
    assert all(torch.equal(a, b) for a, b in zip(tensors_in(weights), tensors_in(expected), strict=True))
    assert (weights.head is weights.embed) is model.tied


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    """Nothing points into the closed, deleted file."""
    path = Tiny().write(tmp_path / "model.cmf")
    weights = loaded(path)
    path.unlink()
    assert torch.equal(hidden(weights), hidden(Tiny().weights()))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.Q8_ROW, DType.Q8_2F, DType.Q4_TILED, DType.Q4_BLOCK])
def test_quantised_matrices(dtype: DType, tmp_path: Path) -> None:
    """What is computed with is what the codec decodes: the dequantised model, written as f32, is the same model."""
    model = Tiny(C=32, D=8, F=64)
    path = model.write(tmp_path / "model.cmf", dtype=dtype)
    with open_model(path) as source:
        decoded = {name: source.decode(name) for name in source.tensors}
    plain = write_arrays(tmp_path / "plain.cmf", model.header(), decoded)
    got, want = loaded(path), loaded(plain)
    assert all(torch.equal(a, b) for a, b in zip(tensors_in(got), tensors_in(want), strict=True))
    # Not the original, and not nothing.
    original = hidden(model.weights())
    error = (hidden(got) - original).norm() / original.norm()
    assert 1e-6 < error < 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_weight_that_is_not_finite_is_named(name: str, value: float, tmp_path: Path) -> None:
    arrays = Tiny().arrays()
    arrays[name].flat[7] = value
    path = write_arrays(tmp_path / "model.cmf", Tiny().header(), arrays)
    with pytest.raises(NonFiniteWeightsError) as caught:
        loaded(path)
    assert caught.value.exit_code == 3
    assert caught.value.tensor == name
    place = [int(i) for i in np.unravel_index(7, arrays[name].shape)]
    assert str(place) in caught.value.message
    assert "1 of " in caught.value.message


def test_infinities_that_cancel_are_found(tmp_path: Path) -> None:
    arrays = Tiny().arrays()
    arrays["model.norm.weight"][3:5] = (np.inf, -np.inf)
    with pytest.raises(NonFiniteWeightsError, match="2 of 16"):
        loaded(write_arrays(tmp_path / "model.cmf", Tiny().header(), arrays))


def test_large_finite_weights_are_fine(tmp_path: Path) -> None:
    """Their f32 sum would overflow."""
    arrays = Tiny().arrays()
    arrays["model.layers.0.mlp.down_proj.weight"][:] = 3e38
    loaded(write_arrays(tmp_path / "model.cmf", Tiny().header(), arrays))


@pytest.mark.parametrize("name", Tiny(layers=1).shapes())
def test_a_flipped_bit_in_any_tensor_is_found(name: str, tmp_path: Path) -> None:
    path = Tiny(layers=1).write(tmp_path / "model.cmf")
    with open_model(path) as model:
        at = model.tensors[name].offset_bytes
    data = bytearray(path.read_bytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CmfFormatError) as caught:
        loaded(path)
    assert (caught.value.exit_code, caught.value.tensor) == (3, name)
