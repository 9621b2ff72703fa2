"""Polish alone: attention stays exact, any layer can be trained, and the file's O(1) setting stays what it was.

And which setting a run uses: each flag wins over the file's hint on its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.stages import pipeline
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.report import Report
from tests.fixtures import LINEAR, Tiny, tiny_text, tiny_tokenizer
from tests.oracles import cmf_reader

HYBRID = Tiny(
    layers=4, gate="interleaved", arch={**LINEAR, "layer_types": ["LinearAttention", "FullAttention"] * 2}, seed=1
)
SLIDING = Tiny(layers=3, arch={"layer_types": ["SlidingAttention"] * 3, "sliding_window": 6}, seed=2)
MIXED = Tiny(
    layers=3,
    arch={"layer_types": ["SlidingAttention", "FullAttention", "FullAttention"], "sliding_window": 6},
    seed=3,
)
CAPPED = Tiny(layers=2, arch={"attn_logit_softcapping": 20.0, "num_loops": 2}, seed=4)
PLAIN = Tiny(layers=2, seed=5)
HINT: dict[str, Any] = {"layers": "deep1", "m": 9, "w": 7, "sink": 1}
PARTS = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def polished(folder: Path, model: Tiny, o1: dict[str, Any], provenance: Any = None, **train: Any) -> Report:
    (folder / "train.txt").write_text(tiny_text(2000, seed=1), encoding="utf-8")
    (folder / "val.txt").write_text(tiny_text(1000, seed=2), encoding="utf-8")
    header = {} if provenance is None else {"provenance": provenance}
    model.write(folder / "in.cmf", tokenizer=tiny_tokenizer(), **header)
    config = PolishConfig.model_validate(
        {
            "o1": o1,
            "corpus": {"train": folder / "train.txt", "val": folder / "val.txt"},
            "train": {"steps": 6, "lr": 3e-3, "eval_every": 3, "seq": 40, "kl": 0.1, **train},
            "gate": {"threshold": 1.0, "slack": 1.0},
            "compute": {"threads": 1, "device": "cpu"},
        }
    )
    return pipeline.run(folder / "in.cmf", folder / "out.cmf", config)


def provenance_of(folder: Path) -> dict[str, Any]:
    provenance: dict[str, Any] = cmf_reader.read(folder / "out.cmf")[0]["provenance"]
    return provenance


def changed(folder: Path) -> set[str]:
    source, written = (cmf_reader.read(folder / name)[1] for name in ("in.cmf", "out.cmf"))
    assert source.keys() == written.keys()
    return {name for name, value in source.items() if not np.array_equal(value, written[name])}


def trained(*layers: int) -> set[str]:
    return {f"model.layers.{i}.{part}.weight" for i in layers for part in PARTS}


CASES = {
    "hybrid, all": (HYBRID, "all", (0, 1, 2, 3)),
    "hybrid, a delta-net layer": (HYBRID, "2", (2,)),
    "hybrid, deep": (HYBRID, "deep2", (2, 3)),
    "sliding": (SLIDING, "all", (0, 1, 2)),
    "capped, looped": (CAPPED, "all", (0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_any_layer_is_trained_and_nothing_is_said_about_attention(tmp_path: Path, name: str) -> None:
    model, layers, expected = CASES[name]
    report = polished(tmp_path, model, {"layers": layers, "m": 4, "w": 5, "sink": 2}, polish_only=True)
    assert (report.outcome, report.gate.status) == ("polished", "ran")
    assert changed(tmp_path) == trained(*expected)
    provenance = provenance_of(tmp_path)
    assert "o1_attn" not in provenance
    assert provenance["fcd"]["converted_layers"] == list(expected)
    # Exact attention on both sides: the first step's student is the teacher, and so is the conversion's perplexity.
    assert report.losses[0].kl == pytest.approx(0, abs=1e-6)
    assert report.ppl.start == pytest.approx(report.ppl.teacher, rel=1e-6)


@pytest.mark.parametrize("o1", [{}, {"layers": "0,1", "m": 4, "w": 5, "sink": 2}], ids=["no flags", "flags"])
def test_the_files_own_setting_stays(tmp_path: Path, o1: dict[str, Any]) -> None:
    """With its unknown keys, and whatever the flags say: they choose layers, not a kernel."""
    hint = HINT | {"note": ["kept", None]}
    polished(tmp_path, PLAIN, o1, {"o1_attn": hint, "other": 1}, polish_only=True)
    assert provenance_of(tmp_path) == {"o1_attn": hint, "other": 1, "fcd": provenance_of(tmp_path)["fcd"]}
    assert changed(tmp_path) == (trained(0, 1) if o1 else trained(1))


def test_short_windows_are_no_obstacle(tmp_path: Path) -> None:
    assert polished(tmp_path, PLAIN, {}, polish_only=True, seq=8).outcome == "polished"


# Converting what can be converted


@pytest.mark.parametrize(
    ("model", "layers", "expected"), [(HYBRID, "all", (1, 3)), (HYBRID, "deep2", (3,)), (MIXED, "all", (1, 2))]
)
def test_what_can_not_be_converted_is_not_trained(
    tmp_path: Path, model: Tiny, layers: str, expected: tuple[int, ...]
) -> None:
    report = polished(tmp_path, model, {"layers": layers, "m": 4, "w": 5, "sink": 2})
    assert report.converted_layers == list(expected)
    assert changed(tmp_path) <= trained(*expected)
    assert provenance_of(tmp_path)["o1_attn"] == {"layers": layers, "m": 4, "w": 5, "sink": 2}
    # Only deepN names what it leaves out: `all` means what there is.
    assert any("can't be converted" in note for note in report.warnings) == layers.startswith("deep")


@pytest.mark.parametrize(
    ("model", "layers", "why"),
    [
        (HYBRID, "0,1", "linear attention"),
        (MIXED, "0,1", "sliding"),
        (CAPPED, "1", "soft-capped"),
        (SLIDING, "all", "sliding"),
        (CAPPED, "deep1", "soft-capped"),
    ],
)
def test_a_layer_that_would_be_another_function_is_refused(tmp_path: Path, model: Tiny, layers: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        polished(tmp_path, model, {"layers": layers, "m": 4, "w": 5, "sink": 2})
    assert caught.value.exit_code == 2
    assert "--polish-only" in caught.value.hint
    assert not (tmp_path / "out.cmf").exists()


# Flags and the file's hint


@pytest.mark.parametrize("flags", [{}, {"layers": "0"}, {"m": 4}, {"w": 5}, {"sink": 3}, {"layers": "all", "w": 6}])
def test_each_flag_wins_on_its_own(tmp_path: Path, flags: dict[str, Any]) -> None:
    report = polished(tmp_path, PLAIN, flags, {"o1_attn": HINT})
    expected = HINT | ({**flags, "layers": [0]} if flags.get("layers") == "0" else flags)
    assert provenance_of(tmp_path)["o1_attn"] == expected
    assert {key: getattr(report.o1, key) for key in ("m", "w", "sink")} == {k: expected[k] for k in ("m", "w", "sink")}
    assert report.converted_layers == {"all": [0, 1], "0": [0]}.get(flags.get("layers", ""), [1])
    assert report.o1.prefill == 20
