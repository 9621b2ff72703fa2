"""`eval`: the same tokens through both kinds of attention, held against oracles and against a polish's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cortiq_fcd.errors import ConfigError, CorpusError, UnsupportedModelError
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.replica import hidden_states
from cortiq_fcd.model.windows import validation_offsets, windows
from cortiq_fcd.stages import evaluation, pipeline
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.reading import NO_SETTING
from cortiq_fcd.stages.readings import EvalReport
from tests.fixtures import Tiny
from tests.oracles import loss
from tests.stages.test_pipeline import furnished, settings

MODEL = Tiny(layers=2, arch={"final_logit_softcapping": 4.0})
O1 = {"layers": "all", "m": 6, "w": 5, "sink": 2}
VAL = np.random.default_rng(4).integers(0, MODEL.V, 900)


def config(**changes: Any) -> PolishConfig:
    sections: dict[str, dict[str, Any]] = {
        "train": {"batch": 2, "seq": 40},
        "compute": {"threads": 1, "device": "cpu", "precision": "f32"},
        "o1": {},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        sections[section][field] = value
    return PolishConfig.model_validate(sections)


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "val.npy", VAL)
    return tmp_path / "val.npy"


def test_the_numbers_are_the_oracles(tmp_path: Path, ids: Path) -> None:
    file = MODEL.write(tmp_path / "in.cmf", provenance={"o1_attn": O1})
    found = evaluation.run(file, config(), ids, 14)  # more than move in step
    replica = MODEL.replica(Conversion((0, 1), "all", m=6, w=5, sink=2, seal=20))
    rows, targets = windows(VAL, validation_offsets(len(VAL), 40, 14), 40, torch.device("cpu"))

    def hidden(seal: int | None) -> torch.Tensor:
        return hidden_states(replica, rows, student=True, seal=seal).unflatten(0, rows.shape)[:, 20:].flatten(0, 1)

    head, tail = replica.weights.head, targets[:, 20:].flatten()
    exact, served = hidden(None), hidden(20)
    want = [loss.ce(x, head, tail, softcap=4.0).mean().exp().item() for x in (exact, served)]
    assert found.served is not None
    assert [found.exact.ppl, found.served.ppl] == pytest.approx(want, rel=1e-5)
    assert found.ratio == found.served.ppl / found.exact.ppl
    assert abs(found.ratio - 1) > 1e-3
    kl = loss.kl(served, exact, head, softcap=4.0, teacher_softcap=4.0).mean().item()
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert (found.windows.count, found.windows.prefill, found.windows.positions) == (14, 20, 14 * 20)
    assert found.o1 is not None
    assert (found.o1.m, found.o1.prefill, found.reason) == (6, 20, "")
    assert (found.text.tokens, found.text.source) == (900, str(ids))
    assert min(found.exact.tokens_per_s, found.served.tokens_per_s) > 0


def test_it_agrees_with_the_report_of_a_polish(tmp_path: Path) -> None:
    """Of the written file: its own setting, the same text, the same windows."""
    folder = furnished(tmp_path)
    asked = settings(folder, compute_precision="f32")
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", asked)
    found = evaluation.run(folder / "out.cmf", config(train_batch=2), folder / "val.txt", None)
    assert found.served is not None
    assert found.served.ppl == pytest.approx(report.ppl.served.final, rel=1e-6)
    assert found.file.dir_hash == report.output.dir_hash
    assert found.text.sha256 == report.corpus.val_sha256
    # The source says deep1, m 9: flags make it the conversion that the polish began with.
    before = evaluation.run(
        folder / "in.cmf", config(o1_layers="all", o1_m=4, o1_w=5, o1_sink=2), folder / "val.txt", None
    )
    assert before.served is not None
    assert before.exact.ppl == pytest.approx(report.ppl.served.teacher, rel=1e-5)
    assert before.served.ppl == pytest.approx(report.ppl.served.start, rel=1e-6)
    assert before.kl == pytest.approx(report.kl_served.start, rel=1e-3)


def test_a_file_without_a_setting_is_exact_and_says_so(tmp_path: Path, ids: Path) -> None:
    file = MODEL.write(tmp_path / "in.cmf")
    found = evaluation.run(file, config(), ids, None)
    assert (found.o1, found.served, found.ratio, found.kl, found.reason) == (None, None, None, None, NO_SETTING)
    assert found.windows.count == 12
    flagged = evaluation.run(file, config(o1_m=6, o1_w=5, o1_sink=2), ids, None)
    assert flagged.served is not None
    assert flagged.o1 is not None
    assert flagged.o1.layers == "all"
    assert flagged.exact.ppl == pytest.approx(found.exact.ppl, rel=1e-12)


def test_the_document_is_its_schema(tmp_path: Path, ids: Path) -> None:
    found = evaluation.run(MODEL.write(tmp_path / "in.cmf"), config(), ids, 1)
    assert EvalReport.model_validate_json(found.to_json()) == found
    assert json.loads(found.to_json())["schema"] == "cortiq-fcd-eval/1"


def test_what_can_not_be_measured(tmp_path: Path, ids: Path) -> None:
    file = MODEL.write(tmp_path / "in.cmf", provenance={"o1_attn": O1})
    np.save(tmp_path / "short.npy", VAL[:40])
    with pytest.raises(CorpusError, match="at least 41 tokens, got 40"):
        evaluation.run(file, config(), tmp_path / "short.npy", None)
    with pytest.raises(ConfigError, match="--prefill equals --seq"):
        evaluation.run(file, config(o1_prefill=40), ids, None)
    with pytest.raises(ConfigError, match="only ever be exact attention"):
        evaluation.run(file, config(o1_w=30), ids, None)
    other = Tiny(arch={"hidden_act": "gelu"}).write(tmp_path / "other.cmf")
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        evaluation.run(other, config(), ids, None)


def test_windows_that_are_not_there_are_told(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", VAL[:44])
    found = evaluation.run(MODEL.write(tmp_path / "in.cmf"), config(), tmp_path / "short.npy", None)
    assert "only 4 distinct windows of 40 tokens, 12 are measured" in found.warnings[-1]
