"""`--o1 auto:N`: which layers are chosen, by what, and where nothing can be chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cortiq_fcd.errors import ConfigError, CorpusError
from cortiq_fcd.events import StageEvent, WarningEvent
from cortiq_fcd.io.corpus import load_corpus
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import Conversion, auto_count
from cortiq_fcd.model.damage import damage_by_layer
from cortiq_fcd.model.untrained import untrained
from cortiq_fcd.model.windows import validation_offsets, windows
from cortiq_fcd.stages import choose, evaluation, pipeline
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.report import Report
from tests.fixtures import Tiny, tiny_text, tiny_tokenizer
from tests.stages.test_pipeline import polished_by, refusal, settings

MODEL = Tiny(layers=4, seed=8)
SETTING = Conversion((0, 1, 2, 3), "all", 4, 5, 2, 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    (tmp_path / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    MODEL.write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer())
    return tmp_path


def damage(folder: Path) -> dict[int, float]:
    """Each layer's cost on the calibration windows, all in one batch."""
    with open_model(folder / "in.cmf") as model:
        corpus = load_corpus(
            train=folder / "train.txt",
            val=folder / "val.txt",
            max_train_bytes=2_000_000,
            max_val_bytes=200_000,
            model=model,
        )
    offsets = validation_offsets(len(corpus.train), 40, choose.CALIBRATION_WINDOWS)
    ids, _ = windows(corpus.train, offsets, 40, torch.device("cpu"))
    return damage_by_layer(untrained(MODEL.weights(), SETTING), ids, range(4))


@pytest.mark.parametrize(
    ("text", "count"), [("auto:3", 3), ("auto:12", 12), ("auto:0", None), ("auto:", None), ("all", None), (None, None)]
)
def test_what_asks_for_a_choice(text: str | None, count: int | None) -> None:
    assert auto_count(text) == count


def test_the_cheapest_layers_are_converted_and_the_report_tells_why(folder: Path) -> None:
    events: list[Any] = []
    report = polished_by(folder, events.append, o1_layers="auto:2", train_batch=3)
    costs = damage(folder)
    cheapest = sorted(sorted(costs, key=lambda i: costs[i])[:2])
    assert report.converted_layers == cheapest == report.o1.layers
    assert report.o1.costs is not None
    assert {cost.layer: cost.kl for cost in report.o1.costs} == pytest.approx(costs, rel=1e-4)
    assert "choose" in report.timing
    stages = [event.stage for event in events if isinstance(event, StageEvent) and event.seconds is None]
    assert stages[:5] == ["dequantize", "choose", "prepare", "dequantize", "replica"]
    with open_model(folder / "out.cmf") as model:
        assert model.header["provenance"]["o1_attn"]["layers"] == cheapest
    assert Report.read(folder / "out.cmf.report.json") == report


def test_the_same_layers_by_number_are_the_same_polish(folder: Path) -> None:
    chosen = polished_by(folder, o1_layers="auto:2")
    told = polished_by(folder, o1_layers=",".join(map(str, chosen.converted_layers)), output_force=True, train_steps=6)
    assert told.output.dir_hash == chosen.output.dir_hash
    assert told.o1.costs is None


def test_what_is_checked_is_checked_before_anything_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "run", None)
    error = refusal(folder, ConfigError, 2, o1_layers="auto:5")
    assert "auto:5: the model has 4 layers" in error.message
    error = refusal(folder, ConfigError, 2, o1_layers="auto:1", train_polish_only=True)
    assert "--polish-only converts no layer" in error.message
    (folder / "out.cmf").write_bytes(b"x")
    assert "exists already" in refusal(folder, ConfigError, 2, o1_layers="auto:1").message


def test_a_forecast_measures_nothing_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "run", None)
    events: list[Any] = []
    asked = settings(folder, o1_layers="auto:2")
    forecast = pipeline.dry_run(folder / "in.cmf", folder / "out.cmf", asked, events.append)
    assert forecast.layers == [2, 3]
    said = [event.message for event in events if isinstance(event, WarningEvent)]
    assert "the 2 deepest layers stand in" in said[0]


def test_layers_that_can_not_be_converted_are_no_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = {"layer_types": ["FullAttention", "FullAttention", "SlidingAttention"], "sliding_window": 7}
    Tiny(layers=3, arch=arch).write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer())
    (tmp_path / "train.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    (tmp_path / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    forecast = pipeline.dry_run(tmp_path / "in.cmf", tmp_path / "out.cmf", settings(tmp_path, o1_layers="auto:1"))
    assert forecast.layers == [1]
    report = polished_by(tmp_path, o1_layers="auto:1")
    assert report.o1.costs is not None
    assert [cost.layer for cost in report.o1.costs] == [0, 1]


def measured(folder: Path, layers: str, text: Path | None = None, count: int | None = None) -> Any:
    asked = PolishConfig.model_validate(
        {
            "o1": {"layers": layers, "m": 4, "w": 5, "sink": 2},
            "train": {"batch": 2, "seq": 40},
            "compute": {"threads": 1, "device": "cpu", "precision": "f32"},
        }
    )
    return evaluation.run(folder / "in.cmf", asked, text or folder / "val.txt", count)


def test_eval_chooses_by_windows_that_it_does_not_measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    run = choose.run
    monkeypatch.setattr(choose, "run", lambda *given: asked.append(given) or run(*given))
    found = measured(folder, "auto:1")
    taken = validation_offsets(1500, 40, found.windows.count)
    (_, _, ids, offsets, _, _) = asked[0]
    assert len(ids) == 1500
    assert len(offsets) == choose.CALIBRATION_WINDOWS
    assert all(abs(a - b) > 40 for a in offsets for b in taken)
    costs = {cost.layer: cost.kl for cost in found.o1.costs}
    assert found.o1.layers == [min(costs, key=lambda i: costs[i])]
    told = measured(folder, str(found.o1.layers[0]))
    assert told.served.ppl == found.served.ppl
    assert told.o1.costs is None


def test_eval_needs_text_to_choose_by(folder: Path) -> None:
    np.save(folder / "short.npy", np.arange(80) % 20)
    with pytest.raises(CorpusError, match="no window of 40 tokens beside"):
        measured(folder, "auto:1", folder / "short.npy", 2)


def test_equal_costs_choose_the_lower_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages.progress import Progress

    monkeypatch.setattr(choose, "damage_by_layer", lambda network, ids, layers: {2: 0.5, 0: 0.5, 3: 0.1, 1: 0.5})
    network = untrained(MODEL.weights(), dataclasses.replace(SETTING))
    train = settings(Path()).train
    choice = choose.run(2, network, np.zeros(100, np.int64), [0, 5], train, Progress(lambda event: None))
    assert choice.layers == (0, 3)
