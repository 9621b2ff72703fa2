"""Every family from a directory to CMF and back, without transformers: the same settings and weights, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cortiq_fcd.io.hf.directory import open_directory
from cortiq_fcd.io.hf.exporting import plan_export
from cortiq_fcd.io.hf.families import describe
from cortiq_fcd.io.hf.importing import plan_import
from cortiq_fcd.io.hf.jsonfile import read_object
from cortiq_fcd.io.hf.names import layer_names
from cortiq_fcd.io.hf.writing import write_export
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.plan import plan_model
from tests.io.small_hf_model import LLAMA, Arrays, write_directory

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
NK, NV, DK, DV, TAPS = 2, 6, 8, 12, 4
HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": NK,
    "linear_num_value_heads": NV,
    "linear_key_head_dim": DK,
    "linear_value_head_dim": DV,
    "linear_conv_kernel_dim": TAPS,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "attention_bias": True},
    "llama, linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 9, "tie_word_embeddings": False},
    "mistral, no window": {"sliding_window": None, "head_dim": 8},
    "qwen2": WINDOWS,
    "qwen3": {**WINDOWS, "head_dim": 32, "rope_scaling": YARN, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {**HYBRID, "num_experts": 0, "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "qwen3_5_text": {**HYBRID, "tie_word_embeddings": False},
}


def config_of(case: str) -> dict[str, Any]:
    return {**LLAMA, "model_type": case.split(",")[0], "architectures": ["XForCausalLM"], **CONFIGS[case]}


def arrays_of(config: dict[str, Any]) -> Arrays:
    """Random weights of the shapes that transformers' modules have."""
    described = describe(config)
    arch, hidden, width = described.arch, config["hidden_size"], config["intermediate_size"]
    head = arch["head_dim"]
    q, kv = arch["num_attention_heads"] * head, arch["num_kv_heads"] * head
    gate = 2 if described.family.delta else 1
    rows = {"q_proj": q * gate, "k_proj": kv, "v_proj": kv, "o_proj": hidden, "q_norm": head, "k_norm": head}
    rows |= {"gate_proj": width, "up_proj": width, "down_proj": hidden, "out_proj": hidden, "norm": DV}
    rows |= {"input_layernorm": hidden, "post_attention_layernorm": hidden, "A_log": NV, "dt_bias": NV}
    rows |= {"in_proj_qkv": 2 * NK * DK + NV * DV, "in_proj_z": NV * DV, "in_proj_a": NV, "in_proj_b": NV}
    columns = {"o_proj": q, "down_proj": width, "out_proj": NV * DV}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (64, hidden), "norm.weight": (hidden,)}
    for i, kind in enumerate(arch["layer_types"]):
        for name, role in layer_names(kind, described.family, described.biases):
            part = name.split(".")[1] if "." in name and not name.startswith(("input", "post")) else name.split(".")[0]
            if part == "conv1d":
                shapes[f"layers.{i}.{name}"] = (2 * NK * DK + NV * DV, 1, TAPS)
            else:
                shape = (rows[part],) if role == "vector" else (rows[part], columns.get(part, hidden))
                shapes[f"layers.{i}.{name}"] = shape
    draw = np.random.default_rng(2)
    arrays = {f"model.{name}": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if not config.get("tie_word_embeddings"):
        arrays["lm_head.weight"] = draw.standard_normal((64, hidden)).astype(np.float32)
    return fuse(arrays) if described.family.fused else arrays


def fuse(arrays: Arrays) -> Arrays:
    """in_proj_qkvz and in_proj_ba as Qwen3-Next stores them: heads outermost."""
    for name in [name for name in arrays if name.endswith("in_proj_qkv.weight")]:
        prefix = name.removesuffix("qkv.weight")
        qkv, z, a, b = (arrays.pop(f"{prefix}{part}.weight") for part in ("qkv", "z", "a", "b"))
        q, k, v = np.split(qkv, (NK * DK, 2 * NK * DK))
        by_head = [part.reshape(NK, -1, part.shape[1]) for part in (q, k, v, z, b, a)]
        arrays[f"{prefix}qkvz.weight"] = np.concatenate(by_head[:4], axis=1).reshape(-1, q.shape[1])
        arrays[f"{prefix}ba.weight"] = np.concatenate(by_head[4:], axis=1).reshape(-1, q.shape[1])
    return arrays


@pytest.mark.parametrize("case", CONFIGS)
def test_there_and_back(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    arrays = arrays_of(config)
    first = plan_import(open_directory(write_directory(tmp_path / "hf", config, arrays)), DType.F32)
    plan_model(first)
    first.write(tmp_path / "out.cmf", force=False)
    with open_model(tmp_path / "out.cmf") as model:
        write_export(plan_export(model, "f32"), tmp_path / "back", "f32", model.header["tokenizer_config"])
    again = plan_import(open_directory(tmp_path / "back"), DType.F32)
    assert again.header == first.header
    assert list(again.tensors) == list(first.tensors)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())


def test_fused_rows_go_where_transformers_reads_them(tmp_path: Path) -> None:
    config = config_of("qwen3_next")
    arrays = arrays_of(config)
    plan = plan_import(open_directory(write_directory(tmp_path / "hf", config, arrays)), DType.F32)
    fused = arrays["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(NK, -1, 64)
    R = NV // NK
    q, k, v, z = np.split(fused, np.cumsum((DK, DK, R * DV)), axis=1)
    name = "model.layers.0.linear_attn.in_proj_"
    expected = np.concatenate([part.reshape(-1, 64) for part in (q, k, v)])
    assert np.array_equal(plan.tensors[name + "qkv.weight"].read(), expected)
    assert np.array_equal(plan.tensors[name + "z.weight"].read(), z.reshape(-1, 64))
    both = arrays["model.layers.0.linear_attn.in_proj_ba.weight"].reshape(NK, 2, R, 64)
    assert np.array_equal(plan.tensors[name + "b.weight"].read(), both[:, 0].reshape(-1, 64))
    assert np.array_equal(plan.tensors[name + "a.weight"].read(), both[:, 1].reshape(-1, 64))


def test_settings_are_written_in_the_spelling_that_all_versions_read(tmp_path: Path) -> None:
    config = config_of("llama")
    first = plan_import(open_directory(write_directory(tmp_path / "hf", config, arrays_of(config))), DType.F32)
    first.write(tmp_path / "out.cmf", force=False)
    with open_model(tmp_path / "out.cmf") as model:
        write_export(plan_export(model, "bf16"), tmp_path / "back", "bf16", None)
    written = read_object(tmp_path / "back" / "config.json")
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, LLAMA3)
    assert "rope_parameters" not in written
    assert (written["attention_bias"], written["torch_dtype"]) == (True, "bfloat16")
