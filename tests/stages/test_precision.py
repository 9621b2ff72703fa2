"""Which precision a run gets: f32 unless bf16 is asked for, and bf16 only where the device has it."""

from __future__ import annotations

import pytest

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.kernels import products
from cortiq_fcd.stages.config import ComputeConfig
from cortiq_fcd.stages.machine import choose_device


@pytest.mark.parametrize("asked", ["auto", "f32"])
def test_f32_unless_bf16_is_asked_for(asked: str) -> None:
    choose_device(ComputeConfig.model_validate({"device": "cpu", "precision": asked}))
    assert products.get_precision() == "f32"


@pytest.mark.skipif(not products.cpu_has_bf16(), reason="this CPU or torch has no bf16 products")
def test_bf16_where_it_is_asked_for_and_there() -> None:
    choose_device(ComputeConfig(device="cpu", precision="bf16"))
    assert products.get_precision() == "bf16"
    choose_device(ComputeConfig(device="cpu"))
    assert products.get_precision() == "f32"


def test_bf16_on_a_processor_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: False)
    with pytest.raises(ConfigError, match="--precision bf16: cpu has no units") as caught:
        choose_device(ComputeConfig(device="cpu", precision="bf16"))
    assert "--precision f32" in str(caught.value.hint)
