"""No field is passed over: docs/models.md, the format's keys and the plan agree, whatever a header says.

A key that counts and has another value gives another plan or an error with its name; so does a tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_fcd.errors import CortiqError, UnsupportedModelError
from cortiq_fcd.events import Event, StageEvent
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.consumed import INFORMATIONAL_KEYS, NEUTRAL_VALUES
from cortiq_fcd.model.mixers import AttentionPlan, DeltaNetPlan
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.stages import pipeline
from cortiq_fcd.stages.config import PolishConfig
from tests.fixtures import LINEAR, Shape, Source, Tiny, tiny_text, tiny_tokenizer, write_arrays

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text("utf-8")

# The keys of `arch` that the format lists; `activation_situ_*` stands for two.
FORMAT_KEYS = re.findall(
    r"\w+",
    """
arch_name hidden_size intermediate_size num_layers num_attention_heads num_kv_heads head_dim vocab_size layer_types
rms_norm_eps norm_style rope_theta tie_word_embeddings partial_rotary_factor yarn attention_heads_per_layer
hidden_act embed_multiplier query_pre_attn_scalar sliding_window sliding_window_pattern rope_local_base_freq
local_partial_rotary_factor global_head_dim num_global_kv_heads global_partial_rotary_factor final_logit_softcapping
attn_logit_softcapping attn_v_norm mla activation_situ_beta activation_situ_linear_beta mtp moe linear_core
head_clusters max_position_embeddings linear_conv_kernel_dim linear_num_key_heads linear_num_value_heads
linear_key_head_dim linear_value_head_dim rope_freq_factors logit_multiplier g3n kda_gate_lower_bound num_loops
loop_final_norm
""",
)

PLAIN = Tiny(seed=1)
SLIDING = Tiny(
    arch={
        "layer_types": ["FullAttention", "SlidingAttention", "FullAttention"],
        "sliding_window": 9,
        "rope_local_base_freq": 100.0,
        "local_partial_rotary_factor": 0.5,
    }
)
HYBRID = Tiny(arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention", "LinearAttention"]})
KINDS = (PLAIN, SLIDING, HYBRID)
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
MODELS = {
    "plain": PLAIN,
    "sliding": SLIDING,
    "hybrid": HYBRID,
    "interleaved gate": Tiny(gate="interleaved"),
    "gate a head": Tiny(gate="head"),
    "gate a channel": Tiny(gate="channel"),
    "untied, all biases": Tiny(tied=False, biases="qkvo"),
    "no q and k norms": Tiny(qk_norm=False),
    "yarn": Tiny(arch={"yarn": YARN}),
}

# Values that a key can have while all tensors stay as they are. Each must give another plan.
FREE: Mapping[str, tuple[Tiny, tuple[Any, ...]]] = {
    "layer_types": (SLIDING, (["FullAttention", "SlidingAttention", "SlidingAttention"], ["SlidingAttention"] * 3)),
    "query_pre_attn_scalar": (PLAIN, (1, 5.5, 64)),
    "attn_logit_softcapping": (PLAIN, (1.5, 50)),
    "sliding_window": (SLIDING, (1, 9, 4096)),
    "rms_norm_eps": (PLAIN, (1e-6, 1e-5, 1)),
    "norm_style": (PLAIN, ("qwen", "gemma")),
    "embed_multiplier": (PLAIN, (1, 0.5, 4)),
    "logit_multiplier": (PLAIN, (1, 0.5, 4)),
    "final_logit_softcapping": (PLAIN, (1.5, 30)),
    "rope_theta": (PLAIN, (1, 0.5, 10000, 1e6)),
    "partial_rotary_factor": (PLAIN, (0.25, 0.5, 0.75, 1)),
    "rope_freq_factors": (PLAIN, ([1, 1, 1, 2], [2.0, 1, 1, 1], [3] * 4)),
    "yarn": (
        PLAIN,
        (
            YARN,
            YARN | {"factor": 8},
            YARN | {"original_max_position_embeddings": 65536},
            YARN | {"beta_fast": 2},
            YARN | {"beta_slow": 0.1},
            YARN | {"truncate": False},
            YARN | {"attention_factor": 2},
            YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
        ),
    ),
    "rope_local_base_freq": (SLIDING, (1, 10000, 1e6)),
    "local_partial_rotary_factor": (SLIDING, (0.25, 0.5, 0.75, 1.0)),
    "num_loops": (PLAIN, (1, 2, 3)),
    "loop_final_norm": (PLAIN, (False, True)),
}
# The tensors' shapes allow these keys one value.
BY_SHAPE: Mapping[str, tuple[Tiny, tuple[Any, ...]]] = {
    "hidden_size": (PLAIN, (15, 17)),
    "num_layers": (PLAIN, (2, 4)),
    "vocab_size": (PLAIN, (30, 100)),  # fewer than there are rows is padding
    "num_attention_heads": (PLAIN, (2, 8, 3)),
    "attention_heads_per_layer": (PLAIN, ([4, 4, 2], [4, 4])),
    "num_kv_heads": (PLAIN, (1, 4)),
    "head_dim": (PLAIN, (4, 16, 10**9)),
    "tie_word_embeddings": (PLAIN, (False,)),
    "linear_core": (HYBRID, ({}, {"kind": "vmf_phase"}, {"kind": "gated_delta_net", "nphase": 2})),
    "linear_num_key_heads": (HYBRID, (1, 4, 3)),
    "linear_num_value_heads": (HYBRID, (2, 8)),
    "linear_key_head_dim": (HYBRID, (5, 7)),
    "linear_value_head_dim": (HYBRID, (4, 6)),
    "linear_conv_kernel_dim": (HYBRID, (2, 4)),
}


def planned(model: Tiny, **arch: Any) -> ModelPlan:
    """The plan; a key that is given as ... is taken out."""
    header = model.header()
    header["arch"] = {key: value for key, value in (header["arch"] | arch).items() if value is not ...}
    return plan_model(Source(header, {name: Shape(shape) for name, shape in model.shapes().items()}))


def refused(model: Tiny, **arch: Any) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        planned(model, **arch)
    assert (caught.value.exit_code, caught.value.subject in caught.value.message) == (4, True)
    return caught.value


def with_tensor(model: Tiny, name: str, shape: tuple[int, ...]) -> ModelPlan:
    shapes = model.shapes() | {name: shape}
    return plan_model(Source(model.header(), {n: Shape(s) for n, s in shapes.items()}))


# The page


def table(title: str) -> dict[str, str]:
    """First and second column of the table under a heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1].strip(" |") for row in rows}


def test_the_page_has_every_key_of_the_format() -> None:
    listed = set(re.findall(r"`([a-z_0-9*]+)`", PAGE))
    expanded = listed | (
        {"activation_situ_beta", "activation_situ_linear_beta"} if "activation_situ_*" in listed else set()
    )
    assert set(FORMAT_KEYS) <= expanded


def test_the_page_is_the_programs() -> None:
    honoured = table("Keys that are honoured")
    assert honoured.keys() == FREE.keys() | BY_SHAPE.keys()
    assert table("Keys that may be there").keys() == INFORMATIONAL_KEYS.keys()
    neutral = table("Keys that are refused unless they ask for nothing")
    told = {key: tuple(json.loads(v.strip("`")) for v in values.split(" or ")) for key, values in neutral.items()}
    assert told == dict(NEUTRAL_VALUES)
    assert set(FORMAT_KEYS) >= honoured.keys() | INFORMATIONAL_KEYS.keys() | NEUTRAL_VALUES.keys()


# Keys


@pytest.mark.parametrize("key", FREE)
def test_every_value_of_an_honoured_key_is_another_plan(key: str) -> None:
    model, values = FREE[key]
    plans = [planned(model, **{key: value}) for value in values]
    assert all(a != b for a, b in itertools.combinations(plans, 2))


@pytest.mark.parametrize("key", BY_SHAPE)
def test_a_size_that_is_not_the_tensors_is_refused(key: str) -> None:
    model, values = BY_SHAPE[key]
    for value in values:
        refused(model, **{key: value})


@pytest.mark.parametrize("key", [*FORMAT_KEYS, "a_key_of_next_year"])
def test_nonsense_under_any_key_is_refused_unless_it_is_informational(key: str) -> None:
    for model, value in itertools.product(KINDS, ("x", [{}], {"x": 1}, -1, float("nan"), 10**400)):
        if key in INFORMATIONAL_KEYS:
            assert replace(planned(model, **{key: value}), arch_name="tiny") == planned(model)
        else:
            assert key in refused(model, **{key: value}).message


@pytest.mark.parametrize("key", [*FORMAT_KEYS, "a_key_of_next_year"])
def test_null_is_absent(key: str) -> None:
    def outcome(model: Tiny, value: Any) -> Any:
        try:
            return planned(model, **{key: value})
        except UnsupportedModelError as error:
            return error.message

    for model in KINDS:
        assert outcome(model, None) == outcome(model, ...)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", 512), ("rope_local_base_freq", 1e4), ("local_partial_rotary_factor", 0.5)]
    + [(key, value) for key, value in LINEAR.items()],
)
def test_a_key_of_layers_that_are_not_there_is_refused(key: str, value: Any) -> None:
    assert refused(PLAIN, **{key: value}).subject == f"arch.{key}"


@pytest.mark.parametrize(
    ("yarn", "subject"),
    [
        ({"factor": 4.0}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 64}, "factor"),
        (YARN | {"rope_theta": 500.0}, "rope_theta"),
        (YARN | {"type": "longrope"}, "type"),
        (YARN | {"rope_type": "linear"}, "rope_type"),
        (YARN | {"mscale": 1.0}, "mscale"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, "mscale"),
        (YARN | {"long_factor": [1.0]}, "long_factor"),
    ],
)
def test_what_yarn_may_not_say(yarn: dict[str, Any], subject: str) -> None:
    assert refused(PLAIN, yarn=yarn).subject == f"arch.yarn.{subject}"


def test_what_yarn_may_say_twice() -> None:
    repeated = YARN | {"type": "yarn", "rope_type": "yarn", "rope_theta": 10000, "beta_fast": 32, "beta_slow": 1}
    assert planned(PLAIN, yarn=repeated) == planned(PLAIN, yarn=YARN)
    assert refused(PLAIN, yarn=YARN, rope_freq_factors=[1.0] * 4).subject == "arch.yarn"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 10**9])
    | st.floats()
    | st.sampled_from(["silu", "qwen", "gemma", "gated_delta_net", "yarn", "FullAttention", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["kind", "factor", "original_max_position_embeddings", "beta_slow", "mscale", "x"]), inner
        )
    ),
    max_leaves=6,
)


@given(
    model=st.sampled_from(list(MODELS.values())),
    arch=st.dictionaries(st.sampled_from([*FORMAT_KEYS, "x"]), JSON, min_size=1, max_size=3),
)
@settings(max_examples=400)
def test_whatever_a_header_says_is_planned_or_refused(model: Tiny, arch: dict[str, Any]) -> None:
    """Never another exception, never more memory than the file is worth."""
    with contextlib.suppress(UnsupportedModelError):
        planned(model, **arch)


# Tensors

OPTIONAL = re.compile(r"self_attn\.([qkvo]_proj\.bias|[qk]_norm\.weight)$")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_tensor_is_used_and_counted(model: Tiny) -> None:
    assert dict(planned(model).shapes) == model.shapes()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_tensor_of_any_other_kind_of_model_is_refused(model: Tiny) -> None:
    """Those of our own other kinds, and all names with another end; what is optional must change the plan."""
    others = {name: shape for other in MODELS.values() for name, shape in other.shapes().items()}
    for name in list(others):
        for end in (".bias", ".weight_scale", ".lora_A.weight", ".zeros"):
            others.setdefault(name.removesuffix(".weight") + end, others[name][:1])
    for missing in ("pre_feedforward_layernorm.weight", "mlp.gate.weight", "mlp.experts.0.up_proj.weight"):
        others[f"model.layers.1.{missing}"] = (16,)
    for name in others.keys() - model.shapes().keys():
        try:
            plan = with_tensor(model, name, others[name])
        except UnsupportedModelError:
            continue
        assert OPTIONAL.search(name) or name.endswith("g_proj.weight"), name
        assert plan != planned(model)


@pytest.mark.parametrize("name", ["q_proj.bias", "o_proj.bias", "q_norm.weight", "k_norm.weight"])
def test_an_optional_tensor_of_another_size_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        with_tensor(Tiny(qk_norm=False), f"model.layers.2.self_attn.{name}", (7,))


def test_a_gate_beside_a_gate_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="g_proj"):
        with_tensor(Tiny(gate="interleaved"), "model.layers.0.self_attn.g_proj.weight", (4, 16))


def test_a_gate_of_another_size_is_refused() -> None:
    for rows in (2, 8, 33):
        with pytest.raises(UnsupportedModelError, match="g_proj"):
            with_tensor(PLAIN, "model.layers.0.self_attn.g_proj.weight", (rows, 16))


def test_skill_overlays_change_nothing() -> None:
    name = "skill.letters.model.layers.0.self_attn.g_proj.weight"
    assert with_tensor(PLAIN, name, (4, 16)) == planned(PLAIN)


# What the plan says


def test_what_can_not_be_converted_says_why() -> None:
    capped = planned(PLAIN, attn_logit_softcapping=50.0)
    assert all("soft-capped" in layer.mixer.obstacle for layer in capped.layers)
    assert [bool(layer.mixer.obstacle) for layer in planned(SLIDING).layers] == [False, True, False]
    assert "sliding" in planned(SLIDING).layers[1].mixer.obstacle
    assert [isinstance(layer.mixer, DeltaNetPlan) for layer in planned(HYBRID).layers] == [True, False, True]
    assert [bool(layer.mixer.obstacle) for layer in planned(HYBRID).layers] == [True, False, True]


def test_the_scale_is_that_of_both_kernels() -> None:
    """A converted layer reads scale and angles from the same plan as its exact form."""
    mixer = planned(PLAIN, query_pre_attn_scalar=64).layers[0].mixer
    assert isinstance(mixer, AttentionPlan)
    assert mixer.scale == pytest.approx(1 / 8, rel=1e-15)
    assert not mixer.obstacle


# Before any work


@pytest.mark.parametrize("whose", ["in.cmf", "teacher.cmf"])
@pytest.mark.parametrize("key", ["a_key_of_next_year", "moe", "hidden_act"])
def test_a_run_is_refused_before_any_work(tmp_path: Path, whose: str, key: str) -> None:
    for name in ("in.cmf", "teacher.cmf"):
        header = PLAIN.header()
        if name == whose:
            header["arch"][key] = {"x": 1}
        write_arrays(tmp_path / name, header, PLAIN.arrays(), tokenizer=tiny_tokenizer())
    (tmp_path / "text").write_text(tiny_text(2000), encoding="utf-8")
    config = PolishConfig.model_validate(
        {
            "o1": {"m": 4, "w": 5, "sink": 2},
            "corpus": {"train": tmp_path / "text"},
            "train": {"seq": 40, "teacher": tmp_path / "teacher.cmf"},
        }
    )
    before, events = set(tmp_path.iterdir()), list[Event]()
    with pytest.raises(CortiqError, match=f"arch.{key}") as caught:
        pipeline.run(tmp_path / "in.cmf", tmp_path / "out.cmf", config, events.append)
    assert caught.value.exit_code == 4
    assert set(tmp_path.iterdir()) == before
    assert {event.stage for event in events if isinstance(event, StageEvent)} == {"prepare"}


@pytest.mark.parametrize("key", ["query_pre_attn_scalar", "rms_norm_eps", "embed_multiplier", "logit_multiplier"])
@pytest.mark.parametrize("value", [1e-300, 1e-13, 1e13, 1e300])
def test_numbers_that_f32_cant_compute_with(tmp_path: Path, key: str, value: float) -> None:
    header = PLAIN.header()
    header["arch"][key] = value
    write_arrays(tmp_path / "in.cmf", header, PLAIN.arrays())
    with open_model(tmp_path / "in.cmf") as model, pytest.raises(UnsupportedModelError, match=f"arch.{key}"):
        plan_model(model)
