"""`gate`: the verdict over a file alone and against another, as a polish would give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.errors import ConfigError, TokenizerError
from cortiq_fcd.io.layout import DType
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.stages import gate, gating, pipeline
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.readings import GateReport
from cortiq_fcd.stages.report import Report
from tests.fixtures import Tiny, tiny_text, tiny_tokenizer
from tests.stages.test_pipeline import MODEL, furnished, settings

O1 = {"layers": "all", "m": 4, "w": 5, "sink": 2}


def config(**changes: Any) -> PolishConfig:
    sections: dict[str, dict[str, Any]] = {
        "train": {"batch": 2, "seq": 40},
        "compute": {"threads": 1, "precision": "f32"},
        "gate": {},
        "o1": {},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        sections[section][field] = value
    return PolishConfig.model_validate(sections)


@pytest.fixture(scope="module")
def polished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = furnished(tmp_path_factory.mktemp("gated"))
    report = pipeline.run(
        folder / "in.cmf", folder / "out.cmf", settings(folder, gate_every_checkpoint=True, compute_precision="f32")
    )
    assert report.outcome == "polished"
    return folder, report


@pytest.mark.parametrize(("threshold", "slack"), [(1.0, 1.0), (0.35, 0.1), (1.0, 0.0)])
def test_against_the_source_it_is_the_polishs_own_verdict(
    polished: tuple[Path, Report], threshold: float, slack: float
) -> None:
    folder, report = polished
    asked = config(gate_threshold=threshold, gate_slack=slack)
    found = gating.run(folder / "out.cmf", asked, folder / "val.txt", folder / "in.cmf")
    chosen = next(entry for entry in report.gate.evals if entry.step == report.best_step)
    assert chosen.scores is not None
    assert (found.scores, found.baseline, found.exact) == (chosen.scores, report.gate.baseline, report.gate.teacher)
    assert found.repetition == chosen.repetition
    assert report.gate.baseline is not None
    assert found.passed is gate.passes(asked.gate, tuple(chosen.scores), tuple(report.gate.baseline))
    assert found.passed is all(prompt.passed for prompt in found.prompts)
    assert found.before is not None
    assert (found.before.dir_hash, found.file.dir_hash) == (report.source.dir_hash, report.output.dir_hash)
    assert report.gate.texts is not None
    for ours, theirs in zip(found.prompts, report.gate.texts.prompts, strict=True):
        assert (ours.prompt, ours.text, ours.before, ours.exact) == (
            theirs.prompt,
            theirs.after,
            theirs.start,
            theirs.teacher,
        )


def test_alone_the_threshold_decides(polished: tuple[Path, Report]) -> None:
    folder, _ = polished
    found = gating.run(folder / "out.cmf", config(gate_threshold=0.0, gate_slack=0.0), folder / "val.txt", None)
    assert found.scores is not None
    assert found.passed is (max(found.scores) == 0)
    assert not found.passed
    assert (found.before, found.baseline, found.before_repetition) == (None, None, None)
    assert [prompt.passed for prompt in found.prompts] == [score == 0 for score in found.scores]
    assert gating.run(folder / "out.cmf", config(gate_threshold=1.0), folder / "val.txt", None).passed


def test_it_speaks_through_the_served_kernel(polished: tuple[Path, Report]) -> None:
    folder, _ = polished
    found = gating.run(folder / "out.cmf", config(), folder / "val.txt", None)
    assert found.o1 is not None
    assert (found.o1.m, found.o1.w, found.o1.prefill) == (4, 5, 400)
    assert found.exact is not None
    assert any(prompt.text != prompt.exact for prompt in found.prompts)


def test_a_file_without_a_setting_is_judged_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    file = MODEL.write(tmp_path / "in.cmf", tokenizer=tiny_tokenizer())
    found = gating.run(file, config(), tmp_path / "val.txt", None)
    assert (found.o1, found.exact, found.exact_repetition) == (None, None, None)
    replica = MODEL.replica(Conversion((0, 1), "all", m=4, w=5, sink=2, seal=20))
    ids = [prompt.ids for prompt in found.prompts]
    from cortiq_fcd.io.corpus import load_text
    from cortiq_fcd.io.reader import open_model

    with open_model(file) as model:
        val = load_text(text=tmp_path / "val.txt", max_bytes=200_000, model=model).ids
    prompts = gate.select_prompts(config().gate, val, replica.conversion)
    assert ids == [list(row) for row in gate.continuations(prompts, replica, student=False)]
    flagged = gating.run(file, config(o1_m=4, o1_w=5, o1_sink=2), tmp_path / "val.txt", None)
    assert flagged.exact == found.scores
    assert [list(row) for row in gate.continuations(prompts, replica)] == [prompt.ids for prompt in flagged.prompts]


def test_a_short_text_is_no_verdict(polished: tuple[Path, Report], tmp_path: Path) -> None:
    folder, _ = polished
    (tmp_path / "short.txt").write_text(tiny_text(300), encoding="utf-8")
    found = gating.run(folder / "out.cmf", config(), tmp_path / "short.txt", folder / "in.cmf")
    assert (found.status, found.passed, found.scores, found.tight_loops, found.prompts) == (
        "skipped",
        None,
        None,
        None,
        [],
    )
    assert "300 tokens" in found.reason
    strict = gating.run(folder / "out.cmf", config(gate_profile="strict"), folder / "val.txt", None)
    assert "the strict profile needs 16" in strict.reason
    assert (strict.profile, strict.new_tokens, strict.granularity) == ("strict", 128, pytest.approx(1 / 125))


def test_the_strict_profile(polished: tuple[Path, Report], tmp_path: Path) -> None:
    folder, _ = polished
    (tmp_path / "long.txt").write_text(tiny_text(12000, seed=3), encoding="utf-8")
    asked = config(gate_profile="strict", gate_threshold=1.0, gate_slack=1.0)
    found = gating.run(folder / "out.cmf", asked, tmp_path / "long.txt", None)
    assert found.repetition is not None
    assert len(found.prompts) == 16
    periods = [text.tight_loop for text in found.repetition.texts]
    assert found.tight_loops == sum(period is not None for period in periods)
    assert [prompt.passed for prompt in found.prompts] == [period is None for period in periods]
    assert found.passed is (found.tight_loops == 0)


def test_another_model_can_not_be_the_baseline(polished: tuple[Path, Report], tmp_path: Path) -> None:
    folder, _ = polished
    deeper = Tiny(layers=3, seed=5).write(tmp_path / "deeper.cmf", tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"--before .*number of layers is 3, expected 2"):
        gating.run(folder / "out.cmf", config(), folder / "val.txt", deeper)
    tokenizer = json.dumps(json.loads(tiny_tokenizer()) | {"version": "1.1"}).encode()
    spoken = MODEL.write(tmp_path / "other.cmf", tokenizer=tokenizer)
    with pytest.raises(TokenizerError, match="--before"):
        gating.run(folder / "out.cmf", config(), folder / "val.txt", spoken)
    half = MODEL.write(tmp_path / "half.cmf", dtype=DType.F16, tokenizer=tiny_tokenizer())
    assert gating.run(folder / "out.cmf", config(), folder / "val.txt", half).baseline is not None


def test_the_document_is_its_schema(polished: tuple[Path, Report]) -> None:
    folder, _ = polished
    found = gating.run(folder / "out.cmf", config(), folder / "val.txt", None)
    assert GateReport.model_validate_json(found.to_json()) == found
    assert json.loads(found.to_json())["schema"] == "cortiq-fcd-gate/1"
