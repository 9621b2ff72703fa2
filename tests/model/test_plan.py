"""Every key of `arch` and every tensor is honoured, informational, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.model.consumed import INFORMATIONAL_KEYS, NEUTRAL_VALUES
from cortiq_fcd.model.mixers import AttentionPlan
from cortiq_fcd.model.plan import ModelPlan, plan_model
from tests.fixtures import Shape, Source, Tiny

# Every key that the format lists, with a value that asks for another forward (or, for sizes, that can't be).
REFUSED: dict[str, Any] = {
    "hidden_size": 0,
    "num_layers": 0,
    "num_attention_heads": -1,
    "num_kv_heads": 3,
    "head_dim": 0,
    "vocab_size": 0,
    "layer_types": ["FullAttention", "Kda", "FullAttention"],
    "rms_norm_eps": 0.0,
    "norm_style": "layernorm",
    "rope_theta": -1.0,
    "tie_word_embeddings": 1,
    "partial_rotary_factor": 0.0,
    "yarn": {"factor": 4.0},
    "attention_heads_per_layer": [4, 4],
    "hidden_act": "gelu_pytorch_tanh",
    "embed_multiplier": 0.0,
    "query_pre_attn_scalar": -256,
    "sliding_window": 512,
    "rope_local_base_freq": 10000.0,
    "local_partial_rotary_factor": 0.5,
    "global_head_dim": 16,
    "num_global_kv_heads": 1,
    "global_partial_rotary_factor": 0.25,
    "final_logit_softcapping": -30.0,
    "attn_logit_softcapping": "50",
    "attn_v_norm": True,
    "mla": {"kv_lora_rank": 64},
    "activation_situ_beta": 1.0,
    "activation_situ_linear_beta": 1.0,
    "mtp": {"layers": 1},
    "moe": {"num_experts": 8},
    "linear_core": {"kind": "vmf_phase"},
    "head_clusters": [1, 2],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_freq_factors": [1.0, 2.0],
    "logit_multiplier": 0.0,
    "g3n": {"altup": 2},
    "kda_gate_lower_bound": -5.0,
    "num_loops": 0,
    "loop_final_norm": 1,
    "a_key_of_next_year": 1,
    "ropeTheta": 10000.0,
    "a_flag_that_is_off": False,
    "an_empty_list": [],
}
# What the format lists and what no value of can change the forward.
INFORMATIONAL = {
    "arch_name": "anything",
    "max_position_embeddings": 7,
    "intermediate_size": 7,
    "sliding_window_pattern": 6,
}


def planned(model: Tiny, edit: Callable[[Source], object] = lambda source: None) -> ModelPlan:
    source = Source(model.header(), {name: Shape(shape) for name, shape in model.shapes().items()})
    edit(source)
    return plan_model(source)


def refusal(model: Tiny, edit: Callable[[Source], object]) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        planned(model, edit)
    assert caught.value.exit_code == 4
    assert caught.value.subject in caught.value.message
    return caught.value


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_asks_for_another_model_is_refused_by_name(key: str) -> None:
    error = refusal(Tiny(), lambda source: source.header["arch"].update({key: REFUSED[key]}))
    assert re.split(r"[.\[]", error.subject.removeprefix("arch."))[0] == key


@pytest.mark.parametrize("key", [key for key in REFUSED if key not in Tiny().header()["arch"]])
def test_null_means_absent(key: str) -> None:
    model = Tiny()
    assert planned(model, lambda source: source.header["arch"].update({key: None})) == planned(model)


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "num_attention_heads", "vocab_size", "layer_types"])
@pytest.mark.parametrize("value", ["absent", None, "3", 3.5, True, [3]])
def test_a_key_that_the_forward_needs(key: str, value: Any) -> None:
    def edit(source: Source) -> None:
        source.header["arch"][key] = value
        if value == "absent":
            del source.header["arch"][key]

    assert refusal(Tiny(), edit).subject.startswith(f"arch.{key}")


@pytest.mark.parametrize("key", INFORMATIONAL)
def test_informational_keys(key: str) -> None:
    plan = planned(Tiny(), lambda source: source.header["arch"].update({key: INFORMATIONAL[key]}))
    assert replace(plan, arch_name="tiny") == Tiny().plan()
    assert INFORMATIONAL_KEYS.keys() == INFORMATIONAL.keys()


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NEUTRAL_VALUES.items() for value in values])
def test_neutral_values_are_no_reason_to_refuse(key: str, value: Any) -> None:
    model = Tiny()
    assert planned(model, lambda source: source.header["arch"].update({key: value})) == planned(model)


def test_a_number_is_not_a_flag() -> None:
    """True == 1 in Python, but not in a file."""
    assert refusal(Tiny(), lambda s: s.header["arch"].update(num_loops=True)).subject == "arch.num_loops"
    assert refusal(Tiny(), lambda s: s.header["arch"].update(attn_v_norm=0)).subject == "arch.attn_v_norm"


def test_defaults_of_the_format() -> None:
    def edit(source: Source) -> None:
        for key in ("tie_word_embeddings", "rms_norm_eps", "intermediate_size", "arch_name"):
            del source.header["arch"][key]

    plan, said = planned(Tiny(tied=False), edit), planned(Tiny(tied=False))
    assert (plan.norm, plan.layers, plan.tied) == (said.norm, said.layers, False)
    assert (plan.norm.eps, plan.norm.plus_one, plan.num_loops, plan.embed_multiplier) == (1e-6, False, 1, 1.0)
    frequencies = attention(plan).rotary.frequencies
    assert frequencies == pytest.approx([10000.0 ** (-i / 4) for i in range(4)], rel=1e-14)
    assert attention(plan).scale == pytest.approx(8**-0.5, rel=1e-15)


def attention(plan: ModelPlan) -> AttentionPlan:
    mixer = plan.layers[0].mixer
    assert isinstance(mixer, AttentionPlan)
    return mixer


# Values of keys that are honoured: each must show in the plan.
HONOURED: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "norm_style": "gemma",
    "rope_theta": 5e5,
    "partial_rotary_factor": 0.5,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "embed_multiplier": 4.0,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "rope_freq_factors": [1.0, 2.0, 4.0, 8.0],
    "logit_multiplier": 0.5,
    "num_loops": 2,
    "loop_final_norm": True,
}


@pytest.mark.parametrize("key", HONOURED)
def test_a_key_that_is_honoured_changes_the_plan(key: str) -> None:
    assert planned(Tiny(), lambda source: source.header["arch"].update({key: HONOURED[key]})) != planned(Tiny())


ROTARY_DIMS = {
    (8, 1.0): 8,
    (8, 0.5): 4,
    (8, 0.25): 2,
    (8, 0.1): 2,  # at least 2
    (8, 1e-9): 2,
    (8, 0.76): 6,  # rounded down
    (10, 0.4): 4,
    (9, 0.9): 8,
    (10, 0.5): None,  # 5, odd
    (6, 0.5): None,
    (8, 0.7): None,
    (9, 1.0): None,
    (8, 1.25): None,  # more than there is
    (8, -0.5): None,
}


@pytest.mark.parametrize(("head_dim", "factor"), ROTARY_DIMS)
def test_rotary_dim(head_dim: int, factor: float) -> None:
    rotary_dim = ROTARY_DIMS[head_dim, factor]
    model = Tiny(D=head_dim, arch={"partial_rotary_factor": factor})
    if rotary_dim is None:
        assert refusal(model, lambda source: None).subject == "arch.partial_rotary_factor"
    else:
        assert 2 * len(attention(planned(model)).rotary.frequencies) == rotary_dim


EXTRA_TENSORS = [
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.self_attn.g_proj.weight",
    "model.layers.1.linear_attn.A_log",
    "model.layers.1.pre_feedforward_layernorm.weight",
    "model.layers.0.mlp.down_proj.bias",
    "model.layers.3.input_layernorm.weight",
    "model.norm.bias",
    "lm_head.bias",
    "lm_head.weight",  # tied
    "skills.demo.weight",
]


@pytest.mark.parametrize("name", EXTRA_TENSORS)
def test_a_tensor_that_the_forward_would_not_use(name: str) -> None:
    assert refusal(Tiny(), lambda source: source.tensors.update({name: Shape((28, 16))})).subject == name


def test_skill_overlays_are_no_reason_to_refuse() -> None:
    name = "skill.demo.model.layers.1.mlp.up_proj.weight"
    plan = planned(Tiny(), lambda source: source.tensors.update({name: Shape((24, 16))}))
    assert plan == Tiny().plan()
    assert name not in plan.shapes


@pytest.mark.parametrize("name", Tiny(tied=False).shapes())
def test_a_tensor_that_is_missing(name: str) -> None:
    """Only the norms of q and k are optional."""
    if "q_norm" in name or "k_norm" in name:
        assert name not in planned(Tiny(tied=False), lambda source: source.tensors.pop(name)).shapes
    else:
        assert refusal(Tiny(tied=False), lambda source: source.tensors.pop(name)).subject == name


@pytest.mark.parametrize("name", Tiny(tied=False, biases="qkvo").shapes())
@pytest.mark.parametrize("change", ["longer", "transposed", "flat", "scalar"])
def test_a_tensor_of_another_shape(name: str, change: str) -> None:
    model = Tiny(tied=False, biases="qkvo", C=20)
    shape = model.shapes()[name]
    shape = {
        "longer": (*shape[:-1], shape[-1] + 1),
        "transposed": shape[::-1] if len(shape) == 2 else (1, *shape),
        "flat": (shape[0] * shape[-1], 1) if len(shape) == 2 else (shape[0], 1),
        "scalar": (),
    }[change]
    subject = refusal(model, lambda source: source.tensors.update({name: Shape(shape)})).subject
    # The width of an FFN is read from its first matrix, so that another one shows up in the others.
    assert subject == name or (subject.split(".mlp.")[0], change) == (name.split(".mlp.")[0], "transposed")


def test_ffn_widths_are_read_layer_by_layer() -> None:
    def edit(source: Source) -> None:
        for name, shape in {"gate": (10, 16), "up": (10, 16), "down": (16, 10)}.items():
            source.tensors[f"model.layers.1.mlp.{name}_proj.weight"] = Shape(shape)

    assert [layer.ffn_size for layer in planned(Tiny(), edit).layers] == [24, 10, 24]


def test_a_standalone_skill_file_is_refused() -> None:
    def edit(source: Source) -> None:
        source.required_features |= 1 << 6

    assert "bit 6" in refusal(Tiny(), edit).subject


def test_layer_types_must_name_every_layer() -> None:
    error = refusal(Tiny(), lambda source: source.header["arch"].update(layer_types=["FullAttention"] * 2))
    assert error.subject == "arch.layer_types"


def test_a_model_without_arch() -> None:
    assert refusal(Tiny(), lambda source: source.header.pop("arch")).subject == "arch.hidden_size"


def test_params_counts_a_tied_head_once() -> None:
    model = Tiny()
    assert model.plan().params == sum(array.size for array in model.arrays().values())


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"eos_token_ids": [0, 2]}, (0, 2)), ({"eos_token_ids": None}, ()), ({}, ()), (None, ())],
)
def test_eos_ids(config: Any, expected: tuple[int, ...]) -> None:
    assert planned(Tiny(), lambda source: source.header.update(tokenizer_config=config)).eos_ids == expected
