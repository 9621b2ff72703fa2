"""Whether a file can be polished, how, and why not: from header and directory alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.stages.inspection import Inspection, inspect_model
from tests.fixtures import LINEAR, Tiny, write_arrays

HYBRID = Tiny(layers=4, arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention"] * 2})
SLIDING = Tiny(arch={"layer_types": ["SlidingAttention"] * 3, "sliding_window": 6})
MIXED = Tiny(arch={"layer_types": ["SlidingAttention", "FullAttention", "SlidingAttention"], "sliding_window": 6})


def inspected(folder: Path, model: Tiny, arch: dict[str, Any] | None = None, **header: Any) -> Inspection:
    document = model.header() | header
    document["arch"] |= arch or {}
    path = write_arrays(folder / "in.cmf", document, model.arrays())
    with open_model(path) as opened:
        return inspect_model(opened, path)


def test_a_plain_model(tmp_path: Path) -> None:
    found = inspected(tmp_path, Tiny())
    assert found.refusal == ""
    assert found.polish is not None
    assert (found.polish.layers, found.polish.notes) == ([0, 1, 2], [])
    assert (found.polish.m, found.polish.w, found.polish.sink) == (32, 128, 4)
    assert found.polish.trainable_params == 3 * (16 + 16 + 3 * 24 * 16)
    assert found.polish.params == sum(array.size for array in Tiny().arrays().values())


def test_the_files_own_setting(tmp_path: Path) -> None:
    hint = {"o1_attn": {"layers": "deep1", "m": 9, "w": 7, "sink": 1}}
    found = inspected(tmp_path, Tiny(), provenance=hint)
    assert found.polish is not None
    assert (found.polish.layers, found.polish.m, found.polish.w, found.polish.sink) == ([2], 9, 7, 1)
    assert found.o1_attn == hint["o1_attn"]


@pytest.mark.parametrize(
    ("model", "layers", "note"),
    [
        (HYBRID, [1, 3], "never converted: layers 0, 2 (it is linear attention already)"),
        (MIXED, [1], "never converted: layers 0, 2 (it is sliding-window attention)"),
        (replace(MIXED, arch={**MIXED.arch, "layer_types": [*MIXED.arch["layer_types"][:2], "FullAttention"]}), [1, 2],
         "never converted: layer 0 (it is sliding-window attention)"),
    ],
)  # fmt: skip
def test_what_is_converted_and_what_never(tmp_path: Path, model: Tiny, layers: list[int], note: str) -> None:
    found = inspected(tmp_path, model)
    assert found.polish is not None
    assert found.polish.layers == layers
    assert [n.split("; ")[0] for n in found.polish.notes] == [note]
    assert "--polish-only" in found.polish.notes[0]


@pytest.mark.parametrize(
    ("model", "arch", "why"),
    [(SLIDING, {}, "sliding-window"), (Tiny(), {"attn_logit_softcapping": 50.0}, "soft-capped")],
)
def test_a_model_that_can_only_be_polished(tmp_path: Path, model: Tiny, arch: dict[str, Any], why: str) -> None:
    found = inspected(tmp_path, model, arch)
    assert found.polish is None
    assert why in found.refusal
    assert "--polish-only" in found.refusal


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ({"a_key_of_next_year": 1}, "arch.a_key_of_next_year"),
        ({"moe": {"num_experts": 8}}, "arch.moe"),
        ({"hidden_act": "gelu"}, "arch.hidden_act"),
        ({"layer_types": ["FullAttention", "Kda", "FullAttention"]}, "arch.layer_types[1]"),
        ({"head_dim": 10**9}, "arch.head_dim"),
    ],
)
def test_a_refused_model_is_still_inspected(tmp_path: Path, arch: dict[str, Any], name: str) -> None:
    found = inspected(tmp_path, Tiny(), arch)
    assert found.polish is None
    assert found.refusal.startswith(name)
    assert "--polish-only" not in found.refusal
    assert found.dtypes[0].dtype == "f32"


@pytest.mark.parametrize("layers", ["deep9", [7], "some"])
def test_a_setting_of_the_file_that_can_not_be(tmp_path: Path, layers: Any) -> None:
    found = inspected(tmp_path, Tiny(), provenance={"o1_attn": {"layers": layers}})
    assert found.polish is None
    assert "o1_attn.layers" in found.refusal
