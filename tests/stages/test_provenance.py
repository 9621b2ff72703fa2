"""Each number of the report and of the record stands under its own name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.io.corpus import Corpus
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import WrittenFile
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.stages import provenance
from cortiq_fcd.stages.artefacts import Comparison, Evaluation, Figures, Gate, Judgement, Step, Stored, Trained
from cortiq_fcd.stages.config import GateConfig, PolishConfig, TrainConfig
from cortiq_fcd.stages.report import Continuation, GateTexts, PolishMemory, PromptTexts, Report, ToolInfo
from tests.fixtures import Tiny
from tests.oracles import cmf_reader

MODEL = Tiny(layers=2)
TRAINED = Trained(
    best_step=4,
    best_ppl=13.0,
    teacher_ppl=11.0,
    evaluations=(
        Evaluation(0, 14.0, Judgement((0.1, 0.2, 0.3), True)),
        Evaluation(2, 15.0, None),
        Evaluation(4, 13.0, Judgement((0.0, 0.2, 0.1), True)),
    ),
    steps=tuple(Step(n, n + 0.1, n + 0.2, n + 0.3, n + 0.4, (n, n + 1)) for n in range(1, 5)),
    passed=True,
    diverged=False,
    gate_seconds=1.0,
)
TEXTS = GateTexts(step=4, prompts=[PromptTexts(prompt="Once", after=Continuation(text=" upon a", repeats=[(0, 5)]))])
STORY = provenance.Story(
    config=PolishConfig(
        train=TrainConfig(steps=9, lr=0.1, kl=0.2, eval_every=2, batch=3, seq=40, seed=6),
        gate=GateConfig(threshold=0.4, slack=0.05),
    ),
    plan=MODEL.plan(),
    conversion=Conversion((1,), "deep1", m=8, w=5, sink=2, seal=19),
    corpus=Corpus(np.arange(70), np.arange(50), "aa", "bb", "from here"),
    trained=TRAINED,
    comparison=Comparison(
        Figures(21.0, 31.0, 0.0, 41.0), Figures(22.0, 32.0, 0.5, 42.0), Figures(23.0, 33.0, 0.25, 43.0)
    ),
    gate=Gate(lambda replica: Judgement((), True), Judgement((0.0, 0.1, 0.2), True), Judgement((0.3, 0.0, 0.4), False)),
    gate_skipped="",
    texts=TEXTS,
    trainable_params=77,
    tool=ToolInfo(name="t", version="1", torch="2", python="3", device="cpu", precision="f32", threads=1),
    created="2020-01-01T00:00:00+00:00",
)
IDENTITY = replace(STORY, trained=replace(TRAINED, best_step=0, best_ppl=14.0, passed=False))
SKIPPED = replace(
    STORY,
    gate=None,
    gate_skipped="too short",
    texts=None,
    trained=replace(TRAINED, evaluations=tuple(replace(e, judgement=None) for e in TRAINED.evaluations)),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("source") / "in.cmf", provenance={"by": "hand"})


def report_of(story: provenance.Story, source: Path) -> Report:
    written = WrittenFile(Path("out.cmf"), 123, "0" * 16, 5, 6)
    with open_model(source) as model:
        return provenance.build_report(
            story, model, Path("out.cmf"), written, {"polish": 2.0}, PolishMemory(peak_rss_bytes=9), ["careful"]
        )


def test_the_report_of_a_polish(source: Path) -> None:
    report = report_of(STORY, source)
    ppl = report.ppl
    assert (ppl.teacher, ppl.start, ppl.best, ppl.final, ppl.untouched) == (11.0, 14.0, 13.0, 23.0, 43.0)
    assert list(ppl.final_windows.model_dump().values()) == [21.0, 22.0, 23.0]
    assert list(ppl.served.model_dump().values()) == [31.0, 32.0, 33.0]
    assert (report.kl_served.start, report.kl_served.final) == (0.5, 0.25)
    assert (report.outcome, report.best_step, report.steps_run, report.converted_layers) == ("polished", 4, 4, [1])
    assert [(loss.step, loss.ce, loss.kl, loss.grad_norm, loss.seconds) for loss in report.losses] == [
        (n, n + 0.1, n + 0.2, n + 0.3, n + 0.4) for n in range(1, 5)
    ]
    assert [(e.step, e.ppl) for e in report.evals] == [(0, 14.0), (2, 15.0), (4, 13.0)]
    gate = report.gate
    assert (gate.status, gate.threshold, gate.slack, gate.baseline, gate.chosen) == (
        "ran",
        0.4,
        0.05,
        [0.1, 0.2, 0.3],
        4,
    )
    assert gate.texts == TEXTS
    assert [(e.step, e.scores, e.passed) for e in gate.evals] == [
        (0, [0.1, 0.2, 0.3], True),
        (2, None, None),
        (4, [0.0, 0.2, 0.1], True),
    ]
    o1 = report.o1
    assert (o1.layers, o1.m, o1.w, o1.sink, o1.prefill) == ("deep1", 8, 5, 2, 19)
    recipe = report.recipe
    assert (recipe.steps, recipe.lr, recipe.kl, recipe.eval_every) == (9, 0.1, 0.2, 2)
    assert (recipe.batch, recipe.seq, recipe.seed) == (3, 40, 6)
    corpus = report.corpus
    assert (corpus.train_tokens, corpus.val_tokens, corpus.source) == (70, 50, "from here")
    assert (corpus.train_sha256, corpus.val_sha256) == ("aa", "bb")
    assert (report.output.bytes, report.output.tensors_copied, report.output.tensors_written) == (123, 5, 6)
    assert (report.trainable_params, report.timing, report.warnings) == (77, {"polish": 2.0}, ["careful"])


def test_the_record_of_a_polish(source: Path) -> None:
    with open_model(source) as model:
        record = provenance.record(STORY, model)
        assert record.source.dir_hash == model.dir_hash
    assert (record.teacher_ppl, record.ppl_start, record.ppl_final) == (11.0, 14.0, 23.0)
    assert (record.steps, record.lr, record.kl_w, record.bs, record.seq, record.seed) == (4, 0.1, 0.2, 3, 40, 6)
    assert (record.best_step, record.converted_layers, record.prefill, record.outcome) == (4, [1], 19, "polished")
    assert (record.gate.baseline, record.gate.chosen, record.save_dtype) == ([0.1, 0.2, 0.3], 4, "f32")


def test_identity(source: Path) -> None:
    report = report_of(IDENTITY, source)
    assert (report.outcome, report.best_step, report.gate.chosen, report.output.save_dtype) == (
        "identity",
        0,
        None,
        None,
    )


def test_a_skipped_gate(source: Path) -> None:
    report = report_of(SKIPPED, source)
    assert (report.gate.status, report.gate.reason, report.gate.evals) == ("skipped", "too short", [])
    assert (report.gate.baseline, report.gate.chosen) == (None, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_becomes_null(value: float, source: Path) -> None:
    broken = replace(
        STORY,
        comparison=Comparison(*[Figures(value, value, value, value)] * 3),
        trained=replace(
            TRAINED,
            best_ppl=value,
            teacher_ppl=value,
            evaluations=(Evaluation(0, value, None),),
            steps=(Step(1, value, value, value, 0.1, (0,), True),),
        ),
    )
    report = report_of(broken, source)
    assert Report.model_validate_json(report.to_json()) == report
    assert set(report.ppl.served.model_dump().values()) == {None}
    assert (report.ppl.teacher, report.ppl.final, report.ppl.untouched, report.kl_served.final) == (None,) * 4
    assert (report.losses[0].ce, report.losses[0].grad_norm, report.evals[0].ppl) == (None, None, None)


def test_writing_leaves_the_sources_header_alone(source: Path, tmp_path: Path) -> None:
    """The opened model is not changed by what is written."""
    with open_model(source) as model:
        before = repr(model.header)
        provenance.run(STORY, model, tmp_path / "out.cmf", Stored({}))
        assert repr(model.header) == before
    header = cmf_reader.read(tmp_path / "out.cmf")[0]
    assert header["provenance"]["by"] == "hand"
    assert header["provenance"]["o1_attn"] == {"layers": "deep1", "m": 8, "w": 5, "sink": 2}


def test_a_report_is_written_whole_or_not_at_all(source: Path, tmp_path: Path) -> None:
    report = report_of(STORY, source)
    provenance.write_report(report, tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
