"""Which layers are converted and with what geometry: flag, else the file's own setting, else the default."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.model.conversion import (
    Conversion,
    expand_layers,
    is_exact,
    landmark_count,
    parse_layers,
    resolve_conversion,
)
from cortiq_fcd.model.plan import ModelPlan
from tests.fixtures import LINEAR, Tiny

PLAN = Tiny(layers=4).plan()
NOTHING: dict[str, Any] = {"layers": None, "m": None, "w": None, "sink": None, "prefill": None, "seq": 512}


def resolved(provenance: Any = None, **flags: Any) -> Conversion:
    return resolve_conversion(PLAN, provenance, **{**NOTHING, **flags})[0]


def notes(provenance: Any = None, **flags: Any) -> list[str]:
    return resolve_conversion(PLAN, provenance, **{**NOTHING, **flags})[1]


def refusal(provenance: Any = None, **flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(provenance, **flags)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("provenance", [None, {}, {"o1_attn": None}, {"o1_attn": {}}, {"o1_attn": "all"}, "text"])
def test_defaults(provenance: Any) -> None:
    assert resolved(provenance) == Conversion((0, 1, 2, 3), "all", 32, 128, 4, 256)


HINT = {"o1_attn": {"layers": "deep2", "m": 16, "w": 20, "sink": 1}}


def test_the_files_own_setting() -> None:
    assert resolved(HINT) == Conversion((2, 3), "deep2", 16, 20, 1, 256)
    assert resolved({"o1_attn": {"layers": [3, 0], "w": 7}}) == Conversion((0, 3), (0, 3), 32, 7, 4, 256)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("layers", "0,1", Conversion((0, 1), (0, 1), 16, 20, 1, 256)),
        ("layers", "all", Conversion((0, 1, 2, 3), "all", 16, 20, 1, 256)),
        ("m", 4, Conversion((2, 3), "deep2", 4, 20, 1, 256)),
        ("w", 1, Conversion((2, 3), "deep2", 16, 1, 1, 256)),
        ("sink", 0, Conversion((2, 3), "deep2", 16, 20, 0, 256)),
        ("prefill", 100, Conversion((2, 3), "deep2", 16, 20, 1, 100)),
        ("seq", 301, Conversion((2, 3), "deep2", 16, 20, 1, 150)),
    ],
)
def test_flags_win_one_by_one(flag: str, value: Any, expected: Conversion) -> None:
    assert resolved(HINT, **{flag: value}) == expected


@pytest.mark.parametrize("field", ["layers", "m", "w", "sink"])
def test_null_in_the_file_means_absent(field: str) -> None:
    assert resolved({"o1_attn": {field: None}}) == resolved()


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", (0, 1, 2, 3)),
        ("deep1", (3,)),
        ("deep4", (0, 1, 2, 3)),
        ("0", (0,)),
        ("3,1", (1, 3)),
        ("1, 3", (1, 3)),
        ("2,2,2", (2,)),
        ([2, 0], (0, 2)),
    ],
)
def test_layer_sets(text: Any, layers: tuple[int, ...]) -> None:
    assert expand_layers(parse_layers(text, "--o1"), 4, "--o1") == layers


NO_TEXT = (
    "",
    "none",
    "ALL",
    "deep",
    "deep0",
    "deep-1",
    "deep05",
    "1,",
    ",1",
    "1;2",
    "-1",
    "1.0",
    "1-3",
    "1234567",
    " 1",
)
NO_LIST = ([], [-1], [True], ["1"], [1.0], None, 3, {"0": 1})


@pytest.mark.parametrize("text", [*NO_TEXT, *NO_LIST])
def test_what_is_no_layer_set(text: Any) -> None:
    with pytest.raises(ConfigError, match="--o1") as caught:
        parse_layers(text, "--o1")
    assert caught.value.hint


@pytest.mark.parametrize("text", ["deep5", "4", "0,9", "deep999999"])
def test_layers_that_are_not_there(text: str) -> None:
    assert "4 layers" in refusal(layers=text).message or "layers 0 to 3" in refusal(layers=text).message


@pytest.mark.parametrize(("field", "value"), [("m", 3), ("m", 8.0), ("w", 0), ("w", "16"), ("sink", -1), ("m", True)])
def test_a_setting_of_the_file_that_can_not_be(field: str, value: Any) -> None:
    hint = {"o1_attn": {field: value}}
    assert f"o1_attn.{field}" in refusal(hint).message
    assert resolved(hint, **{field: 8}) == resolved(**{field: 8})


def test_a_layer_set_of_the_file_that_can_not_be() -> None:
    for layers in ("deep9", [7], "many", [], 0, False):
        assert "o1_attn.layers" in refusal({"o1_attn": {"layers": layers}}).message
        assert resolved({"o1_attn": {"layers": layers}}, layers="deep1").layers == (3,)


def test_the_refusal_of_the_defaults() -> None:
    """At the defaults every window of at most 281 tokens stays exact."""
    assert "--seq 282" in refusal(seq=281).hint
    assert resolved(seq=282).seal == 141


@given(w=st.integers(1, 300), sink=st.integers(0, 40))
def test_the_hint_is_the_shortest_seq_that_works(w: int, sink: int) -> None:
    shortest = int(refusal(w=w, sink=sink, seq=2).hint.split("--seq ")[1].split()[0])
    assert not is_exact(resolved(w=w, sink=sink, seq=shortest).seal, w, sink)
    refusal(w=w, sink=sink, seq=shortest - 1)
    refusal(w=w, sink=sink, seq=shortest // 2)


@given(w=st.integers(1, 100), sink=st.integers(0, 20), prefill=st.integers(1, 200), seq=st.integers(2, 200))
def test_following_the_hints_of_a_prefill_ends_in_a_run(w: int, sink: int, prefill: int, seq: int) -> None:
    """Whatever was given, doing what the hint says works at once."""
    flags = {"w": w, "sink": sink, "prefill": prefill, "seq": seq}
    try:
        resolved(**flags)
    except ConfigError as error:
        if prefill <= seq:
            words = error.hint.split()
            for flag in ("prefill", "seq"):
                if f"--{flag}" in words:
                    flags[flag] = int(words[words.index(f"--{flag}") + 1])
            assert not is_exact(resolved(**flags).seal, w, sink)


@pytest.mark.parametrize(("prefill", "seq"), [(0, 100), (101, 100), (-1, 100)])
def test_a_seal_outside_the_window(prefill: int, seq: int) -> None:
    assert "--prefill" in refusal(prefill=prefill, seq=seq, w=4).message


def test_fewer_landmarks_than_asked_for_are_told() -> None:
    assert notes(w=16, seq=512) == []
    assert any("16" in note and "32" in note for note in notes(w=16, seq=256))


@pytest.mark.parametrize(
    ("seal", "m", "count"), [(9, 4, 4), (39, 8, 4), (40, 8, 5), (48, 8, 6), (65, 5, 5), (1000, 32, 32)]
)
def test_landmark_count(seal: int, m: int, count: int) -> None:
    assert landmark_count(seal, m) == count


def test_the_record_is_what_a_runtime_reads() -> None:
    assert resolved().record() == {"layers": "all", "m": 32, "w": 128, "sink": 4}
    assert resolved(layers="2,0").record() == {"layers": [0, 2], "m": 32, "w": 128, "sink": 4}
    assert resolved({"o1_attn": resolved(HINT).record()}) == resolved(HINT)


HYBRID = Tiny(
    layers=4, arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention", "LinearAttention", "FullAttention"]}
).plan()
SLIDING = Tiny(layers=2, arch={"layer_types": ["SlidingAttention"] * 2, "sliding_window": 9}).plan()
CAPPED = Tiny(layers=2, arch={"attn_logit_softcapping": 50.0}).plan()


def resolved_for(plan: ModelPlan, **flags: Any) -> tuple[Conversion, list[str]]:
    return resolve_conversion(plan, None, **{**NOTHING, "w": 16, "m": 8, **flags})


def test_all_means_the_layers_that_can_be_converted() -> None:
    found, told = resolved_for(HYBRID)
    assert (found.layers, found.converted, found.spec, told) == ((1, 3), (1, 3), "all", [])


def test_deep_counts_all_layers_and_then_drops_with_a_warning() -> None:
    found, told = resolved_for(HYBRID, layers="deep3")
    assert (found.layers, found.spec) == ((1, 3), "deep3")
    assert len(told) == 1
    assert "2" in told[0]
    assert resolved_for(HYBRID, layers="deep1") == (Conversion((3,), "deep1", 8, 16, 4, 256), [])


def test_a_listed_layer_that_can_not_be_converted_is_an_error() -> None:
    with pytest.raises(ConfigError, match="layer 2"):
        resolved_for(HYBRID, layers="1,2")


@pytest.mark.parametrize("plan", [SLIDING, CAPPED], ids=["sliding", "capped"])
@pytest.mark.parametrize("layers", ["all", "deep2", "1"])
def test_a_set_that_leaves_nothing_is_an_error(plan: ModelPlan, layers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved_for(plan, layers=layers)
    assert caught.value.exit_code == 2


def test_a_polish_alone_trains_any_layer_and_needs_no_long_windows() -> None:
    for plan, layers in ((HYBRID, (0, 1, 2, 3)), (SLIDING, (0, 1)), (CAPPED, (0, 1))):
        found, told = resolved_for(plan, polish_only=True, seq=2)
        assert (found.layers, found.converted, told) == (layers, (), [])
    with pytest.raises(ConfigError):
        resolved_for(HYBRID, polish_only=True, layers="4")
