"""A directory's config.json, tensors and dtypes as a CMF file: nothing is ignored, nothing is guessed."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_fcd.errors import CmfFormatError, ConfigError, CortiqError, NonFiniteWeightsError, UnsupportedModelError
from cortiq_fcd.io.hf import encoding
from cortiq_fcd.io.hf.directory import open_directory
from cortiq_fcd.io.hf.families import FAMILIES, INFORMATIONAL, NEUTRAL, OUTER_INFORMATIONAL, describe
from cortiq_fcd.io.hf.importing import Import, plan_import
from cortiq_fcd.io.hf.names import fused_rows
from cortiq_fcd.io.hf.quantization import QUANTS, parse_quant
from cortiq_fcd.io.layout import DATA_ALIGN, LARGE_TENSOR_BYTES, TENSOR_ALIGN, DType, align
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.model.plan import plan_model
from tests.io.small_hf_model import LLAMA, llama_arrays, write_directory

MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
NEXT = {**LLAMA, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 8}


def planned(folder: Path, quant: str = "f16") -> Import:
    return plan_import(open_directory(folder), parse_quant(quant))


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        describe(config)
    for word in words:
        assert word in caught.value.message


# config.json


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_rope_layers", [1, 0]),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
        ("model_type", "gemma3_text"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2.0),
        ("vocab_size", True),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rope_theta", -1.0),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"type": "linear", "rope_type": "default"}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}),
        ("rope_scaling", [1]),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_keys_that_change_the_function_are_refused_by_name(key: str, value: Any) -> None:
    where = key.replace("rope_scaling", "rope_")
    refused({**LLAMA, key: value}, where)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"])
def test_keys_that_must_be_there(key: str) -> None:
    refused({name: value for name, value in LLAMA.items() if name != key}, key, "missing")


@pytest.mark.parametrize("key", [*INFORMATIONAL, *NEUTRAL])
def test_keys_that_change_nothing(key: str) -> None:
    value = NEUTRAL[key][0] if key in NEUTRAL else LLAMA.get(key, 1)
    assert describe({**LLAMA, key: value}).arch == describe(LLAMA).arch
    assert key not in INFORMATIONAL or len(INFORMATIONAL[key]) > 5


def test_nested_text_config() -> None:
    outer = {"model_type": "llava", "architectures": ["XForConditionalGeneration"], "text_config": LLAMA}
    assert describe({**outer, "vision_config": {"depth": 3}}).arch == describe(LLAMA).arch
    assert all(OUTER_INFORMATIONAL.values())
    refused({**outer, "text_config": {**LLAMA, "surprise": 3}}, "text_config.surprise")
    refused({**outer, "surprise": 3}, "surprise")
    untied = {**outer, "tie_word_embeddings": False}
    assert describe(untied).tied is False  # the outer one counts, as it does for the model that is loaded


def test_both_spellings_of_rope_settings_agree() -> None:
    scaling = {"factor": 4, "original_max_position_embeddings": 128}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    expected = describe({**LLAMA, **old}).arch
    assert expected["rope_theta"] == 5e5
    assert expected["yarn"] == {"factor": 4.0, "original_max_position_embeddings": 128}
    assert describe({**LLAMA, **new}).arch == expected
    assert describe({**LLAMA, **new, "rope_theta": 5e5}).arch == expected
    refused({**LLAMA, **new, "rope_scaling": {"type": "linear", "factor": 2.0}}, "contradicts")
    refused({**LLAMA, **new, "rope_theta": 3.0}, "contradicts")


def test_llama3_factors_are_plain_over_scaled_frequencies() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": scaling, "head_dim": 128}
    factors = describe(config).arch["rope_freq_factors"]
    assert len(factors) == 64
    for i, factor in enumerate(factors):  # Llama 3.1's own words
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled = frequency
        elif wavelength > 8192 / 1:
            scaled = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / 8 + smooth * frequency
        assert factor == pytest.approx(frequency / scaled, rel=1e-12)
    assert {round(factors[0], 6), round(factors[-1], 6)} == {1.0, 8.0}


def test_windows() -> None:
    sliding = ["SlidingAttention"] * 2
    arch = describe({**MISTRAL, "sliding_window": 100}).arch
    assert (arch["layer_types"], arch["sliding_window"]) == (sliding, 100)
    assert "sliding_window" not in describe({**MISTRAL, "sliding_window": None}).arch
    silent = describe(MISTRAL)
    assert silent.arch["sliding_window"] == 4096
    assert "4096" in silent.notes[0]
    refused({**MISTRAL, "layer_types": ["full_attention"] * 2}, "layer_types")

    some = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert describe({**QWEN2, **some}).arch["layer_types"] == ["FullAttention", "SlidingAttention"]
    off = describe({**QWEN2, **some, "use_sliding_window": False}).arch
    assert off["layer_types"] == ["FullAttention"] * 2
    assert "sliding_window" not in off
    listed = {**QWEN3, **some, "layer_types": ["sliding_attention", "full_attention"]}
    assert describe(listed).arch["layer_types"] == ["SlidingAttention", "FullAttention"]
    refused({**listed, "use_sliding_window": False}, "layer_types[0]")


def test_hybrids_say_where_their_full_layers_are() -> None:
    kinds = describe({**NEXT, "num_experts": 0}).arch["layer_types"]
    assert kinds == (["LinearAttention"] * 3 + ["FullAttention"]) * 2
    assert describe({**NEXT, "num_experts": 0, "full_attention_interval": 2}).arch["layer_types"][1] == "FullAttention"
    refused({**NEXT, "num_experts": 4}, "num_experts", "layer 0")
    refused({**NEXT, "num_experts": 4, "mlp_only_layers": [0, 1, 2]}, "layer 3")
    assert describe({**NEXT, "num_experts": 4, "mlp_only_layers": list(range(8))})


def test_fused_rows_are_each_used_once() -> None:
    arch = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    rows = fused_rows(arch)
    for whole, size in (("in_proj_qkvz", 2 * (2 * 8 + 2 * 36)), ("in_proj_ba", 12)):
        used = np.concatenate([where for name, where in rows.values() if name == whole])
        assert sorted(used) == list(range(size))
    # The second key head's q follows the first one's q, k, v and z.
    assert list(rows["in_proj_qkv"][1][:16]) == [*range(8), *range(88, 96)]


# The head


def test_whether_the_head_is_the_embedding(tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    arrays = llama_arrays(LLAMA)
    own_head = {**arrays, "lm_head.weight": llama_arrays(seed=3)["model.embed_tokens.weight"]}
    copied = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"].copy()}
    for number, (config, tensors, tied) in enumerate(
        [(silent, arrays, True), (silent, own_head, False), (LLAMA, arrays, True), (LLAMA, copied, True)]
    ):
        plan = planned(write_directory(tmp_path / str(number), config, tensors))
        assert plan.header["arch"]["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in plan.tensors) is not tied
        plan_model(plan)
    for number, (config, tensors) in enumerate([(LLAMA, own_head), ({**LLAMA, "tie_word_embeddings": False}, arrays)]):
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
            planned(write_directory(tmp_path / f"wrong{number}", config, tensors))


# Tensors


def test_tensors_that_are_missing_or_too_much_are_refused_by_name(tmp_path: Path) -> None:
    arrays = llama_arrays()
    missing = {name: array for name, array in arrays.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        planned(write_directory(tmp_path / "a", LLAMA, missing))
    bias = {**arrays, "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        planned(write_directory(tmp_path / "b", LLAMA, bias))
    biased = {**LLAMA, "attention_bias": True}
    with pytest.raises(UnsupportedModelError, match=r"k_proj\.bias"):
        planned(write_directory(tmp_path / "c", biased, bias))


def test_what_a_text_never_meets_is_left_out_and_told(tmp_path: Path) -> None:
    more = {"mtp.fc.weight": np.zeros((2, 2), np.float32), "model.visual.x": np.zeros(3, np.float32)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    plan = planned(write_directory(tmp_path, LLAMA, {**llama_arrays(), **more}))
    assert not any(name in plan.tensors for name in more)
    assert len(plan.notes) == 3  # two of these, and no tokenizer
    assert "mtp" in "".join(plan.notes)


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.layers.1.self_attn.k_proj.weight"] = np.zeros((48, 64), np.float32)
    with pytest.raises(UnsupportedModelError, match="k_proj"):
        plan_model(planned(write_directory(tmp_path, LLAMA, arrays)))


def test_order_of_execution_and_no_padding_beyond_alignment(tmp_path: Path) -> None:
    plan = planned(write_directory(tmp_path / "hf", LLAMA, llama_arrays()), "f32")
    plan.write(tmp_path / "out.cmf", force=False)
    with open_model(tmp_path / "out.cmf") as model:
        names = list(model.tensors)
        assert names[0] == "model.embed_tokens.weight"
        assert names[1] == "model.layers.0.input_layernorm.weight"
        assert names[5:8] == [f"model.layers.0.{name}.weight" for name in ORDER]
        assert names[-1] == "model.norm.weight"
        records = list(model.tensors.values())
        for before, record in pairwise(records):
            step = DATA_ALIGN if record.nbytes >= LARGE_TENSOR_BYTES else TENSOR_ALIGN
            assert record.offset_bytes == align(before.span.end_bytes, step)
    assert verify_model(tmp_path / "out.cmf") == []


ORDER = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj")


# Dtypes


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(tmp_path: Path, quant: str, dtype: str) -> None:
    arrays = llama_arrays(dtype=dtype)
    plan = planned(write_directory(tmp_path / "hf", LLAMA, arrays), quant)
    plan_model(plan)
    plan.write(tmp_path / "out.cmf", force=False)
    vector = DType.F16 if dtype == "float16" and quant != "f32" else DType.F32
    embedding = QUANTS[quant] if quant in ("f32", "f16", "bf16", "q8_row", "q8_2f") else DType.Q8_ROW
    bound = {"f32": 1e-7, "f16": 1e-3, "bf16": 1e-2, "q8_row": 0.01, "q8_2f": 0.01}.get(quant, 0.15)
    with open_model(tmp_path / "out.cmf") as model:
        for name, record in model.tensors.items():
            role = vector if len(record.shape) == 1 else embedding if "embed" in name else QUANTS[quant]
            assert record.dtype == role, name
            error = np.abs(model.decode(name) - arrays[name]).max() / np.abs(arrays[name]).max()
            assert error <= (0 if len(record.shape) == 1 and dtype != "float64" else bound), name
        assert model.header["quant_type"] == QUANTS[quant].label
    assert verify_model(tmp_path / "out.cmf") == []


def bfloat16_directory(folder: Path) -> dict[str, np.ndarray]:
    """Bits of bf16 weights by name, in a directory that says so."""
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in llama_arrays().items()}
    write_directory(folder, LLAMA, bits)
    path = folder / "model.safetensors"
    data = path.read_bytes().replace(b'"U16"', b'"BF16"')
    added = len(data) - path.stat().st_size
    path.write_bytes((int.from_bytes(data[:8], "little") + added).to_bytes(8, "little") + data[8:])
    return bits


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    bits = bfloat16_directory(tmp_path / "hf")
    for quant in ("bf16", "f16", "q8_row", "f32"):
        planned(tmp_path / "hf", quant).write(tmp_path / "out.cmf", force=True)
        with open_model(tmp_path / "out.cmf") as model:
            for name, expected in bits.items():
                record = model.tensors[name]
                if len(record.shape) == 1:
                    assert record.dtype == (DType.F32 if quant == "f32" else DType.BF16)
                if record.dtype == DType.BF16:
                    assert np.array_equal(model.raw(name).view(np.uint16), expected.reshape(-1))
                exact = (expected.astype(np.uint32) << 16).view(np.float32)
                assert np.abs(model.decode(name) - exact).max() <= {"f16": 3e-4, "q8_row": 3e-3}.get(quant, 0)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("block", [1, 100, 64 * 5, 64 * 64])
def test_blocks_of_rows_give_the_bytes_of_the_whole(
    tmp_path: Path, quant: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**LLAMA, "intermediate_size": 160}
    arrays = llama_arrays(config)
    arrays["model.embed_tokens.weight"][7] = 0
    plan = planned(write_directory(tmp_path / "hf", config, arrays), quant)
    plan.write(tmp_path / "whole.cmf", force=False)
    monkeypatch.setattr(encoding, "BLOCK_WEIGHTS", block)
    plan.write(tmp_path / "blocks.cmf", force=False)
    assert (tmp_path / "blocks.cmf").read_bytes() == (tmp_path / "whole.cmf").read_bytes()


def test_errors_in_blocks_tell_the_place_in_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_WEIGHTS", 100)
    arrays = llama_arrays()
    arrays["model.layers.1.mlp.up_proj.weight"][50, 3] = 1e5
    with pytest.raises(ConfigError, match=f"index {50 * 64 + 3}"):
        planned(write_directory(tmp_path / "a", LLAMA, arrays)).write(tmp_path / "a.cmf", force=False)
    arrays["model.layers.1.mlp.up_proj.weight"][50, 3] = np.nan
    with pytest.raises(NonFiniteWeightsError, match=f"index {50 * 64 + 3}"):
        planned(write_directory(tmp_path / "b", LLAMA, arrays), "q8_row").write(tmp_path / "b.cmf", force=False)


def test_vbit_is_the_kind_with_offsets() -> None:
    assert parse_quant("vbit") == DType.VBIT_RO
    with pytest.raises(ConfigError, match="q3") as caught:
        parse_quant("q3")
    assert "q4tp" in caught.value.hint


@pytest.mark.parametrize("quant", ["q4_tiled", "q4tp", "vbit"])
def test_widths_that_a_dtype_can_not_hold_fall_back_and_are_told(tmp_path: Path, quant: str) -> None:
    config = {**LLAMA, "intermediate_size": 100}
    plan = planned(write_directory(tmp_path / "hf", config, llama_arrays(config)), quant)
    plan.write(tmp_path / "out.cmf", force=False)
    with open_model(tmp_path / "out.cmf") as model:
        for name, record in model.tensors.items():
            if "down_proj" in name:
                assert record.dtype == DType.Q8_ROW
                assert any(note.startswith(f"{name} is q8_row instead of") and "100" in note for note in plan.notes)
            elif "up_proj" in name:
                assert record.dtype == QUANTS[quant]


def test_an_overflow_of_f16_names_the_tensor(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.norm.weight"][3] = 1e5  # a vector keeps f32
    planned(write_directory(tmp_path / "a", LLAMA, arrays)).write(tmp_path / "a.cmf", force=False)
    arrays["model.layers.1.mlp.up_proj.weight"][2, 3] = 1e5
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight.*100000.*f16"):
        planned(write_directory(tmp_path / "b", LLAMA, arrays)).write(tmp_path / "b.cmf", force=False)
    assert not list(tmp_path.glob("*b.cmf*"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers_name_the_tensor(tmp_path: Path, value: float, name: str) -> None:
    arrays = llama_arrays()
    arrays[name].flat[5] = value
    with pytest.raises(NonFiniteWeightsError) as caught:
        planned(write_directory(tmp_path / "hf", LLAMA, arrays)).write(tmp_path / "out.cmf", force=False)
    assert caught.value.tensor == name
    assert not (tmp_path / "out.cmf").exists()


# Text


def test_what_goes_with_the_text(tmp_path: Path) -> None:
    text = {"chat_template": "{{ x }}", "bos_token": {"content": "<s>"}, "pad_token": "<p>", "eos_token": "</s>"}
    text["added_tokens_decoder"] = {"7": {"content": "<s>"}, "8": {"content": "<p>"}, "9": {"content": "</s>"}}
    folder = write_directory(tmp_path / "a", tokenizer=b'{"any": "bytes "}\n', tokenizer_config=text)
    plan = planned(folder)
    assert plan.vocab == b'{"any": "bytes "}\n'
    ids = {"eos_token_ids": [9], "bos_token_id": 7, "pad_token_id": 8}
    assert plan.header["tokenizer_config"] == {"chat_template": "{{ x }}", **ids}

    config = {**LLAMA, "eos_token_id": 4, "bos_token_id": 5}
    write_directory(folder, config, tokenizer_config=text, generation_config={"eos_token_id": [1, 2]})
    ids = {"eos_token_ids": [1, 2], "bos_token_id": 5, "pad_token_id": 8}
    assert planned(folder).header["tokenizer_config"] == {"chat_template": "{{ x }}", **ids}

    (folder / "chat_template.jinja").write_text("{{ own }}", encoding="utf-8")
    assert planned(folder).header["tokenizer_config"]["chat_template"] == "{{ own }}"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert planned(folder).header["tokenizer_config"]["chat_template"] == "d"


def test_settings_that_are_no_json_are_refused(tmp_path: Path) -> None:
    folder = write_directory(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": NaN}', encoding="utf-8")
    with pytest.raises(CmfFormatError, match="generation_config"):
        planned(folder)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = write_directory(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}', encoding="utf-8")
    with pytest.raises(CmfFormatError, match="surrogate"):
        planned(folder)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 8, -1, 2**40, 10**400])
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HYBRID = {**NEXT, "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 8, "linear_num_key_heads": 16}
KEYS = sorted({*LLAMA, *HYBRID, *NEUTRAL, "head_dim", "sliding_window", "use_sliding_window", "max_window_layers"})


@settings(deadline=None, max_examples=150)
@given(
    base=st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3, NEXT, HYBRID]),
    changed=st.dictionaries(
        st.sampled_from([*KEYS, "rope_theta", "rope_scaling", "text_config"]), JSON_VALUES, max_size=3
    ),
    rope=st.dictionaries(st.sampled_from([*ROPE, "type", "rope_theta", "truncate", "mscale"]), JSON_VALUES, max_size=3),
)
def test_any_config_is_understood_or_has_a_typed_error(
    base: dict[str, Any], changed: dict[str, Any], rope: dict[str, Any]
) -> None:
    config = {**base, "rope_parameters": {**ROPE, **rope}, **changed}
    try:
        described = describe(json.loads(json.dumps(config)))
    except CortiqError:
        return
    json.dumps(described.arch, allow_nan=False)


def test_every_family_has_a_name_of_transformers() -> None:
    assert all(family.architecture.endswith("ForCausalLM") for family in FAMILIES.values())
