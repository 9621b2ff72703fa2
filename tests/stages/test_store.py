"""Trained tensors as OUT will hold them: what is measured afterwards is what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cortiq_fcd.io.codecs import CODECS
from cortiq_fcd.io.layout import DType
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.stages import store
from cortiq_fcd.stages.config import OutputConfig, SaveDtype
from tests.fixtures import Tiny

SETTING = Conversion((0, 2), (0, 2), m=6, w=5, sink=2, seal=20)
TRAINED = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = [f"model.layers.{i}.{part}.weight" for i in (0, 2) for part in TRAINED]
# A bound on the relative error of a matrix: half a unit of the last place, or of 127 levels.
ROUNDING = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_row": 0.02, "q8_2f": 0.02}


def network() -> Replica:
    return Tiny(seed=8).replica(SETTING)


@pytest.mark.parametrize("save_dtype", ROUNDING)
def test_masters_become_what_is_stored(save_dtype: SaveDtype) -> None:
    replica = network()
    before = {name: value.clone() for name, value in replica.masters.named.items()}
    stored = store.run(OutputConfig(save_dtype=save_dtype), replica)
    assert list(stored.tensors) == NAMES
    assert stored.notes == ()
    for name, (dtype, array) in stored.tensors.items():
        gain = "norm" in name
        quantised = save_dtype.startswith("q8")
        assert dtype is (DType.F32 if gain and quantised else DType[save_dtype.upper()])
        shape = tuple(before[name].shape)
        assert dtype is store.stored_dtype(OutputConfig(save_dtype=save_dtype), shape)
        values = array if dtype is DType.F32 else CODECS[dtype].decode(array, shape)
        master = replica.masters.named[name]
        assert np.array_equal(values, master.numpy())
        error = ((master - before[name]).norm() / before[name].norm()).item()
        assert error <= ROUNDING[save_dtype]
        assert (error > 0) is (dtype is not DType.F32)


def test_a_tensor_that_f16_can_not_hold_stays_f32_and_is_told() -> None:
    replica = network()
    big = replica.masters.named[NAMES[4]]
    big[1, 2] = 70000.0
    before = big.clone()
    stored = store.run(OutputConfig(save_dtype="f16"), replica)
    assert stored.tensors[NAMES[4]][0] is DType.F32
    assert torch.equal(big, before)
    assert len(stored.notes) == 1
    assert NAMES[4] in stored.notes[0]
    assert "70000" in stored.notes[0]
    assert {dtype for name, (dtype, _) in stored.tensors.items() if name != NAMES[4]} == {DType.F16}


def test_frozen_weights_are_left_alone() -> None:
    replica = network()
    frozen = [layer.down.clone() for layer in replica.weights.layers]
    store.run(OutputConfig(save_dtype="q8_row"), replica)
    assert all(torch.equal(a, layer.down) for a, layer in zip(frozen, replica.weights.layers, strict=True))
