"""`cortiq-fcd export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from cortiq_fcd.io.hf import writing
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import create_model
from tests.command_line import Run, leftovers
from tests.io.small_hf_model import LLAMA, llama_arrays, write_directory
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[1]


def test_export_and_back(run: Run, tmp_path: Path) -> None:
    data = ROOT / "cortiq_fcd" / "data"
    ran = run("export", data / "demo.cmf", tmp_path / "hf", "--json")
    assert ran.code == 0, ran.err
    assert "exact attention" in ran.err
    assert ran.document["output"]["shards"] == 1
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == files
    marks = ["--o1", "all", "--o1-m", "16", "--o1-window", "8", "--o1-sink", "4"]
    assert run("convert", tmp_path / "hf", tmp_path / "demo.cmf", *marks).code == 0
    with open_model(data / "demo.cmf") as first, open_model(tmp_path / "demo.cmf") as second:
        assert second.header["provenance"]["o1_attn"] == first.header["provenance"]["o1_attn"]
        assert second.section("vocab") == first.section("vocab")
        assert second.header["tokenizer_config"] == first.header["tokenizer_config"]
        assert first.tensors.keys() == second.tensors.keys()
        for name, record in first.tensors.items():
            assert second.tensors[name].dtype == record.dtype
            assert np.array_equal(first.raw(name), second.raw(name))


def test_export_in_shards_and_other_floats(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    model = write_tiny_model(tmp_path / "in.cmf")
    ran = run("export", model, tmp_path / "hf", "--dtype", "f16", "--json")
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert ran.document["output"]["shards"] == len(shards) > 1
    arrays = {name: array for shard in shards for name, array in load_file(shard).items()}
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text("utf-8"))
    assert index["weight_map"].keys() == arrays.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    with open_model(model) as source:
        assert all(np.array_equal(source.decode(name).astype(np.float16), array) for name, array in arrays.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))["torch_dtype"] == "float16"
    assert run("convert", tmp_path / "hf", tmp_path / "back.cmf").code == 0


def test_export_goes_into_a_new_directory_only(run: Run, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "in.cmf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine", encoding="utf-8")
    for target in (tmp_path / "full", model, tmp_path / "no" / "where"):
        ran = run("export", model, target)
        assert (ran.code, ran.out) == (2, "")
        assert "hint: " in ran.err
    assert run("export", model, tmp_path / "x", "--dtype", "q8_row").code == 2
    (tmp_path / "empty").mkdir()
    assert run("export", model, tmp_path / "empty").code == 0


@pytest.mark.parametrize(
    "arch",
    [
        {"embed_multiplier": 2.0},
        {"logit_multiplier": 0.5},
        {"query_pre_attn_scalar": 4},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 30.0},
        {"num_loops": 2},
        {"norm_style": "gemma"},
        {"partial_rotary_factor": 0.5},
        {"rope_freq_factors": [1.0, 1.5, 2.0, 3.0]},
        {"layer_types": ["FullAttention", "SlidingAttention"], "sliding_window": 4, "partial_rotary_factor": 0.25},
    ],
)
def test_what_a_config_can_not_say_is_refused_by_name(run: Run, tmp_path: Path, arch: dict[str, Any]) -> None:
    model = write_tiny_model(tmp_path / "in.cmf", arch=arch)
    ran = run("export", model, tmp_path / "hf")
    assert (ran.code, ran.out) == (4, "")
    assert f"arch.{list(arch)[-1]}" in ran.err
    assert not (tmp_path / "hf").exists()


def test_a_record_of_rope_settings_counts_only_if_it_explains_the_factors(run: Run, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    folder = write_directory(tmp_path / "hf", {**LLAMA, "rope_scaling": scaling})
    assert run("convert", folder, tmp_path / "out.cmf").code == 0
    assert run("export", tmp_path / "out.cmf", tmp_path / "back").code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["rope_scaling"] == scaling
    with open_model(tmp_path / "out.cmf") as model:
        header = json.loads(json.dumps(model.header))
        tensors = [(n, DType.F32, r.shape, lambda n=n: model.decode(n)) for n, r in model.tensors.items()]
        header["arch"]["rope_freq_factors"][3] *= 1.01
        create_model(tmp_path / "other.cmf", header=header, tensors=tensors)
    ran = run("export", tmp_path / "other.cmf", tmp_path / "other")
    assert ran.code == 4
    assert "rope_freq_factors" in ran.err


def test_a_weight_too_large_for_f16_leaves_no_directory(run: Run, tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.norm.weight"][0] = 1e6
    folder = write_directory(tmp_path / "hf", LLAMA, arrays)
    assert run("convert", folder, tmp_path / "out.cmf").code == 0
    ran = run("export", tmp_path / "out.cmf", tmp_path / "back", "--dtype", "f16")
    assert ran.code == 2
    assert "model.norm.weight" in ran.err
    assert not (tmp_path / "back").exists()
    assert leftovers(tmp_path) == []


def test_special_tokens_come_back_by_name(run: Run, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    folder = write_directory(
        tmp_path / "hf", {**LLAMA, "bos_token_id": 1, "eos_token_id": [2]}, tokenizer=words.to_str().encode()
    )
    run("convert", folder, tmp_path / "out.cmf")
    assert run("export", tmp_path / "out.cmf", tmp_path / "back").code == 0
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text("utf-8"))
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == words.to_str().encode()
