"""From a file to a polished file: what is written, what is told, and what leaves nothing behind."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.errors import (
    CmfFormatError,
    ConfigError,
    CorpusError,
    CortiqError,
    DivergedError,
    NonFiniteWeightsError,
    NothingPassedError,
    TokenizerError,
    UnsupportedModelError,
)
from cortiq_fcd.events import DoneEvent, EvalEvent, Event, GateEvent, StageEvent, StepEvent, WarningEvent, ignore
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.stages import gate, pipeline, polish
from cortiq_fcd.stages.artefacts import Gate
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.report import Provenance, Report
from tests.fixtures import GOLDEN, NO_GOLDEN, Tiny, tiny_text, tiny_tokenizer, write_arrays
from tests.oracles import cmf_reader
from tests.stages.test_polish import broken_at

MODEL = Tiny(layers=2, seed=5)
SKILL = "skill.letters.model.layers.0.mlp.up_proj.weight"
TRAINED = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# Keys that no reader knows, in another order than ours, beside keys that a polish replaces.
UNKNOWN: dict[str, Any] = {
    "zusätzlich": {"größe": [1, None, {"x": "é"}], "a": 1.5},
    "tokenizer_config": {"eos_token_ids": [], "bos_token_id": None, "z": [0], "chat_template": "{{ x }}"},
    "provenance": {
        "made_by": {"ünïcode": "ja"},
        "o1_attn": {"layers": "deep1", "m": 9, "w": 7, "sink": 1},
        "fcd": "old",
    },
    "calibration": {"texts": 3},
    "skills": [{"id": "letters", "unknown": True}],
}
SEQ, STEPS, BATCH = 40, 6, 2


def settings(folder: Path, **changes: Any) -> PolishConfig:
    """A short run with the gate open, so that perplexity chooses; `changes` by section_field."""
    sections: dict[str, dict[str, Any]] = {
        "o1": {"layers": "all", "m": 4, "w": 5, "sink": 2},
        "corpus": {"train": folder / "train.txt", "val": folder / "val.txt"},
        "train": {"steps": STEPS, "lr": 2e-3, "eval_every": 2, "batch": BATCH, "seq": SEQ, "seed": 1},
        "gate": {"threshold": 1.0, "slack": 1.0},
        "compute": {"threads": 1, "device": "cpu"},
        "output": {},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        sections[section][field] = value
    return PolishConfig.model_validate(sections)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, its texts, and room for OUT."""
    return furnished(tmp_path)


def furnished(folder: Path) -> Path:
    (folder / "train.txt").write_text(tiny_text(3000, seed=1), encoding="utf-8")
    (folder / "val.txt").write_text(tiny_text(1500, seed=2), encoding="utf-8")
    arrays = {SKILL: np.ones((24, 16), np.float32), **MODEL.arrays()}
    header = MODEL.header() | UNKNOWN
    header["arch"]["a_key_of_next_year"] = None
    write_arrays(folder / "in.cmf", header, arrays, tokenizer=tiny_tokenizer(), masks=b"masks?!", index=b"index")
    return folder


def polished_by(folder: Path, listener: Callable[[Event], None] = ignore, **changes: Any) -> Report:
    return pipeline.run(folder / "in.cmf", folder / "out.cmf", settings(folder, **changes), listener)


def refusal(folder: Path, kind: type[CortiqError], exit_code: int, **changes: Any) -> CortiqError:
    """The error of a run that must leave the folder as it was."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(kind) as caught:
        polished_by(folder, **changes)
    assert caught.value.exit_code == exit_code
    assert "\n" not in caught.value.message
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
    return caught.value


def payloads(path: Path) -> dict[str, tuple[DType, bytes]]:
    with open_model(path) as model:
        return {name: (record.dtype, model.raw(name).tobytes()) for name, record in model.tensors.items()}


# A run that ends well


@dataclass(frozen=True)
class Done:
    folder: Path
    report: Report
    events: list[Event]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = furnished(tmp_path_factory.mktemp("polished"))
    events: list[Event] = []
    return Done(folder, polished_by(folder, events.append), events)


def test_it_is_a_polish(done: Done) -> None:
    """Otherwise the tests below would say little."""
    assert done.report.outcome == "polished"
    assert done.report.best_step > 0
    assert done.report.gate.status == "ran"


def test_out_is_a_whole_file_to_an_independent_reader(done: Done) -> None:
    out = done.folder / "out.cmf"
    assert verify_model(out) == []
    header, tensors, sections = cmf_reader.read(out)  # every hash, bound and section
    source_header, source_tensors, source_sections = cmf_reader.read(done.folder / "in.cmf")
    assert sections == source_sections
    assert list(tensors) == list(source_tensors)
    trained = {f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in TRAINED}
    changed = {name for name in tensors if not np.array_equal(tensors[name], source_tensors[name])}
    assert changed == trained
    assert header["section_hashes"] == source_header["section_hashes"]


def test_untouched_tensors_are_byte_identical(done: Done) -> None:
    source, out = payloads(done.folder / "in.cmf"), payloads(done.folder / "out.cmf")
    assert list(out) == list(source)
    same = {name for name in source if out[name] == source[name]}
    assert same == {name for name in source if not any(part in name for part in TRAINED) or name == SKILL}
    assert (done.report.output.tensors_copied, done.report.output.tensors_written) == (len(same), 10)
    assert {out[name][0] for name in out.keys() - same} == {DType.F32}


def test_every_header_key_survives_but_for_what_a_polish_writes(done: Done) -> None:
    source, out = (cmf_reader.read(done.folder / name)[0] for name in ("in.cmf", "out.cmf"))
    assert list(out) == list(source)
    assert {k: v for k, v in out.items() if k != "provenance"} == {k: v for k, v in source.items() if k != "provenance"}
    assert list(out["provenance"]) == ["made_by", "o1_attn", "fcd"]
    assert out["provenance"]["made_by"] == UNKNOWN["provenance"]["made_by"]
    assert out["provenance"]["o1_attn"] == {"layers": "all", "m": 4, "w": 5, "sink": 2}


def test_the_record_in_the_file(done: Done) -> None:
    report = done.report
    fcd = Provenance.model_validate(cmf_reader.read(done.folder / "out.cmf")[0]["provenance"]["fcd"])
    assert (fcd.steps, fcd.lr, fcd.kl_w, fcd.bs, fcd.seq, fcd.seed) == (STEPS, 2e-3, 0.7, BATCH, SEQ, 1)
    assert (fcd.teacher_ppl, fcd.ppl_start, fcd.ppl_final) == (report.ppl.teacher, report.ppl.start, report.ppl.final)
    assert fcd.final_windows == report.ppl.final_windows
    assert (fcd.best_step, fcd.outcome, fcd.converted_layers) == (report.best_step, "polished", [0, 1])
    assert (fcd.prefill, fcd.save_dtype) == (20, "f32")
    assert (fcd.gate.status, fcd.gate.baseline, fcd.gate.chosen) == ("ran", report.gate.baseline, report.best_step)
    with open_model(done.folder / "in.cmf") as source:
        assert fcd.source.dir_hash == source.dir_hash
    train = hashlib.sha256((done.folder / "train.txt").read_bytes()).hexdigest()
    assert fcd.corpus.train_sha256 == report.corpus.train_sha256 == train


def test_the_report(done: Done) -> None:
    report = done.report
    assert Report.read(done.folder / "out.cmf.report.json") == report
    assert report.source.bytes == (done.folder / "in.cmf").stat().st_size
    assert report.output.bytes == (done.folder / "out.cmf").stat().st_size
    with open_model(done.folder / "out.cmf") as out:
        assert report.output.dir_hash == out.dir_hash
    assert report.trainable_params == 2 * (2 * 16 + 3 * 24 * 16)
    assert report.source.params == sum(a.size for a in MODEL.arrays().values())
    assert (report.corpus.train_tokens, report.corpus.val_tokens) == (3000, 1500)
    assert [e.step for e in report.evals] == [0, 2, 4, 6]
    assert [loss.step for loss in report.losses] == list(range(1, STEPS + 1))
    assert report.ppl.best == min(e.ppl for e in report.evals if e.ppl is not None)
    assert report.ppl.start == report.evals[0].ppl
    assert report.ppl.final == report.ppl.final_windows.final
    assert report.ppl.final_windows.final < report.ppl.final_windows.start
    assert report.kl_served.final != report.kl_served.start
    assert len(report.gate.baseline) == 3
    assert set(report.timing) >= {"dequantize", "replica", "gate", "polish", "evaluate"}
    assert min(report.timing.values()) >= 0
    phases = {"sampling", "shared", "teacher", "student", "head", "backprop", "optimizer", "validation", "checkpoint"}
    assert {f"polish.{phase}" for phase in phases} <= set(report.timing)
    assert report.memory.peak_rss_bytes > 1 << 20


def test_a_second_look_at_out_gives_the_same_figures(done: Done) -> None:
    """A run over OUT starts where the first one ended: same windows, same weights, through the file."""
    config = settings(done.folder, train_steps=1, gate_enabled=False)
    again = pipeline.run(done.folder / "out.cmf", done.folder / "again.cmf", config)
    assert again.ppl.final_windows.start == pytest.approx(done.report.ppl.final_windows.final, rel=1e-6)
    assert again.ppl.served.start == pytest.approx(done.report.ppl.served.final, rel=1e-6)
    assert again.ppl.start == pytest.approx(done.report.ppl.best, rel=1e-6)


def test_events_tell_the_run_in_order(done: Done) -> None:
    events, report = done.events, done.report
    stages = [(e.stage, e.seconds is not None) for e in events if isinstance(e, StageEvent)]
    order = ["prepare", "dequantize", "replica", "gate", "evaluate", "polish", "evaluate", "provenance"]
    assert stages == [(name, ended) for name in order for ended in (False, True)]
    steps = [e for e in events if isinstance(e, StepEvent)]
    assert [(e.step, e.ce, e.kl, e.grad_norm, e.seconds) for e in steps] == [
        (loss.step, loss.ce, loss.kl, loss.grad_norm, loss.seconds) for loss in report.losses
    ]
    assert {(e.steps, e.tokens) for e in steps} == {(STEPS, BATCH * SEQ)}
    evals = [e for e in events if isinstance(e, EvalEvent)]
    assert [(e.step, e.ppl) for e in evals] == [(e.step, e.ppl) for e in report.evals]
    assert (evals[-1].best_step, evals[-1].best_ppl) == (report.best_step, report.ppl.best)
    judged = [e for e in report.gate.evals if e.scores is not None]
    assert [(e.step, e.scores, e.passed) for e in events if isinstance(e, GateEvent)] == [
        (e.step, e.scores, e.passed) for e in judged
    ]
    # A checkpoint is judged before its evaluation is told, and every step comes before the validation behind it.
    kinds = [(type(e).__name__, e.step) for e in events if isinstance(e, StepEvent | EvalEvent)]
    assert kinds[:4] == [("EvalEvent", 0), ("StepEvent", 1), ("StepEvent", 2), ("EvalEvent", 2)]
    assert isinstance(events[-1], DoneEvent)
    assert (events[-1].outcome, events[-1].output) == ("polished", str(done.folder / "out.cmf"))
    assert events[-1].report == str(done.folder / "out.cmf.report.json")
    assert [e.message for e in events if isinstance(e, WarningEvent)] == report.warnings


def test_two_runs_write_the_same_bytes(done: Done, folder: Path) -> None:
    polished_by(folder)
    assert (folder / "out.cmf").read_bytes() == (done.folder / "out.cmf").read_bytes()


def test_another_seed_writes_other_bytes(done: Done, folder: Path) -> None:
    polished_by(folder, train_seed=2)
    assert (folder / "out.cmf").read_bytes() != (done.folder / "out.cmf").read_bytes()


def test_the_gate_can_judge_every_checkpoint_to_the_same_end(done: Done, folder: Path) -> None:
    report = polished_by(folder, gate_every_checkpoint=True)
    assert all(e.scores is not None for e in report.gate.evals)
    assert (folder / "out.cmf").read_bytes() == (done.folder / "out.cmf").read_bytes()


def test_the_input_is_only_read(done: Done, folder: Path) -> None:
    assert (done.folder / "in.cmf").read_bytes() == (folder / "in.cmf").read_bytes()


# What is written otherwise


@pytest.mark.parametrize("save_dtype", ["f16", "bf16", "q8_row", "q8_2f"])
def test_save_dtype(save_dtype: str, folder: Path) -> None:
    report = polished_by(folder, output_save_dtype=save_dtype)
    assert report.output.save_dtype == save_dtype
    source, out = payloads(folder / "in.cmf"), payloads(folder / "out.cmf")
    for name, (dtype, data) in out.items():
        if name == SKILL or not any(part in name for part in TRAINED):
            assert (dtype, data) == source[name]
        else:
            gain = "norm" in name and save_dtype.startswith("q8")
            assert dtype is (DType.F32 if gain else DType[save_dtype.upper()])
    assert verify_model(folder / "out.cmf") == []
    header, _, _ = cmf_reader.read(folder / "out.cmf")
    assert header["provenance"]["fcd"]["save_dtype"] == save_dtype
    # What is reported is what was stored: a run over OUT starts from the reported figures.
    config = settings(folder, train_steps=1, gate_enabled=False)
    again = pipeline.run(folder / "out.cmf", folder / "again.cmf", config)
    assert again.ppl.served.start == pytest.approx(report.ppl.served.final, rel=1e-6)
    assert report.ppl.served.final != pytest.approx(polished_by(folder, output_force=True).ppl.served.final, rel=1e-9)


@pytest.mark.parametrize(("layers", "trained"), [("deep1", [1]), ("0", [0]), (None, [1])])
def test_layer_sets(layers: str | None, trained: list[int], folder: Path) -> None:
    """Without a flag the file's own setting holds: deep1."""
    report = polished_by(folder, o1_layers=layers)
    assert report.converted_layers == trained
    source, out = payloads(folder / "in.cmf"), payloads(folder / "out.cmf")
    changed = {name for name in out if out[name] != source[name]}
    assert changed == {f"model.layers.{i}.{part}.weight" for i in trained for part in TRAINED}
    expected = [0] if layers == "0" else "deep1"
    assert cmf_reader.read(folder / "out.cmf")[0]["provenance"]["o1_attn"]["layers"] == expected


@pytest.fixture
def always_looping(monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages import gate

    monkeypatch.setattr(gate, "greedy", lambda replica, ids, *args, **kwargs: [[3] * 60 for _ in ids])


@pytest.mark.usefixtures("always_looping")
@pytest.mark.parametrize("save_dtype", ["f32", "q8_row"])
def test_identity_copies_every_byte(save_dtype: str, folder: Path) -> None:
    report = polished_by(folder, gate_threshold=0.35, output_save_dtype=save_dtype)
    assert (report.outcome, report.best_step, report.gate.chosen) == ("identity", 0, None)
    assert report.output.save_dtype is None
    assert payloads(folder / "out.cmf") == payloads(folder / "in.cmf")
    assert (report.output.tensors_copied, report.output.tensors_written) == (len(payloads(folder / "in.cmf")), 0)
    assert report.ppl.final_windows.final == report.ppl.final_windows.start
    assert report.ppl.served.final == report.ppl.served.start
    assert report.ppl.best == report.ppl.start
    header, _, _ = cmf_reader.read(folder / "out.cmf")
    assert header["provenance"]["fcd"]["outcome"] == "identity"
    assert header["provenance"]["fcd"]["gate"]["chosen"] is None
    assert header["provenance"]["o1_attn"] == {"layers": "all", "m": 4, "w": 5, "sink": 2}
    assert verify_model(folder / "out.cmf") == []


def test_step_0_competes(folder: Path) -> None:
    """A rate that changes nothing: ties go to the earliest, and step 0 did pass the gate."""
    report = polished_by(folder, train_lr=1e-12)
    assert (report.outcome, report.best_step, report.gate.chosen) == ("identity", 0, 0)
    assert payloads(folder / "out.cmf") == payloads(folder / "in.cmf")
    assert {e.ppl for e in report.evals} == {report.ppl.start}


@pytest.mark.usefixtures("always_looping")
def test_require_pass_writes_nothing(folder: Path) -> None:
    error = refusal(folder, NothingPassedError, 10, gate_threshold=0.35, gate_require_pass=True)
    assert "--require-pass" in error.message


def test_a_gate_that_can_not_run_is_skipped_with_its_reason(folder: Path) -> None:
    (folder / "val.txt").write_text(tiny_text(500, seed=2), encoding="utf-8")
    events: list[Event] = []
    report = polished_by(folder, events.append)
    assert (report.outcome, report.gate.status, report.gate.chosen) == ("polished", "skipped", None)
    assert "500 tokens" in report.gate.reason
    assert (report.gate.evals, report.gate.baseline) == ([], None)
    assert any("gate was skipped" in warning and "500 tokens" in warning for warning in report.warnings)
    assert [e.message for e in events if isinstance(e, WarningEvent)] == report.warnings
    assert not [e for e in events if isinstance(e, GateEvent)]
    assert cmf_reader.read(folder / "out.cmf")[0]["provenance"]["fcd"]["gate"]["status"] == "skipped"


def test_a_gate_that_exact_attention_would_not_pass_is_told_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gate.run

    def looping(*arguments: Any) -> Gate | None:
        judged = real(*arguments)
        assert judged is not None
        return replace(judged, exact=replace(judged.exact, scores=(0.6, 0.35, 0.4)))

    monkeypatch.setattr(gate, "run", looping)
    events: list[Event] = []
    polished_by(folder, events.append, gate_threshold=0.35)
    kinds = [type(e) for e in events if isinstance(e, StepEvent) or "exact" in getattr(e, "message", "")]
    assert kinds == [WarningEvent] + [StepEvent] * STEPS
    (told,) = (e.message for e in events if "exact attention itself" in getattr(e, "message", ""))
    assert "scores 0.60 on prompt 1, 0.40 on prompt 3 (limit 0.35)" in told
    assert "--gate-threshold" in told


def test_a_skipped_gate_under_require_pass(folder: Path) -> None:
    (folder / "val.txt").write_text(tiny_text(500, seed=2), encoding="utf-8")
    error = refusal(folder, NothingPassedError, 10, gate_require_pass=True)
    assert "500 tokens" in error.message


def test_no_gate_is_no_reason_to_warn(folder: Path) -> None:
    report = polished_by(folder, gate_enabled=False)
    assert (report.outcome, report.gate.status) == ("polished", "skipped")
    assert "--no-gate" in report.gate.reason
    assert not any("gate was skipped" in warning for warning in report.warnings)


def test_what_was_not_measured_is_null_with_a_reason(folder: Path) -> None:
    """A validation text that the windows cover, and a seal at the end of the windows."""
    (folder / "val.txt").write_text(tiny_text(300, seed=2), encoding="utf-8")
    report = polished_by(folder, o1_prefill=SEQ)
    assert report.ppl.untouched is None
    assert any("untouched" in warning for warning in report.warnings)
    assert (report.ppl.served.start, report.ppl.served.final, report.kl_served.final) == (None, None, None)
    assert any("served" in warning for warning in report.warnings)


def test_fewer_landmarks_than_asked_for_are_a_warning(folder: Path) -> None:
    report = polished_by(folder, o1_m=32)
    assert report.o1.m == 32
    assert any("landmarks" in warning for warning in report.warnings)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=NO_GOLDEN)
def test_a_sharded_model_becomes_one_file(folder: Path) -> None:
    """And the same as from the model in one file, but for the order of the tensors and the source's hash."""
    files = {"corpus_train": GOLDEN / "models/train.txt", "corpus_val": GOLDEN / "models/val.txt"}
    config = settings(folder, **files, train_steps=1, gate_enabled=False)
    shard = GOLDEN / "polished/tiny-qwen3-sharded-00002-of-00003.cmf"
    report = pipeline.run(shard, folder / "out.cmf", config)
    whole = pipeline.run(GOLDEN / "models/tiny-qwen3.cmf", folder / "whole.cmf", config)
    header, _, sections = cmf_reader.read(folder / "out.cmf")
    assert "shard" not in header
    assert sections == cmf_reader.read(folder / "whole.cmf")[2]
    assert payloads(folder / "out.cmf") == payloads(folder / "whole.cmf")
    assert (report.outcome, report.ppl) == (whole.outcome, whole.ppl)
    assert report.source.bytes == sum(path.stat().st_size for path in GOLDEN.glob("polished/tiny-qwen3-sharded-*.cmf"))


def test_ids_instead_of_text(done: Done, folder: Path) -> None:
    """The same ids give the same weights; files of ids need no tokenizer."""
    write_arrays(folder / "in.cmf", MODEL.header(), MODEL.arrays(), force=True)
    for name in ("train", "val"):
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        np.save(folder / f"{name}.npy", np.array([" .abcdefghijklmnopqrstuvwxyz\n".index(c) for c in text], np.uint16))
    polished_by(folder, corpus_train=folder / "train.npy", corpus_val=folder / "val.npy")
    name = "model.layers.1.mlp.down_proj.weight"
    assert payloads(folder / "out.cmf")[name] == payloads(done.folder / "out.cmf")[name]


def test_a_polish_alone_leaves_the_files_own_setting(folder: Path) -> None:
    """Attention stays exact on both sides: nothing is converted, so nothing is said about it."""
    report = polished_by(folder, train_polish_only=True, train_seq=20, o1_layers="all")
    assert (report.outcome, report.recipe.polish_only) == ("polished", True)
    header = cmf_reader.read(folder / "out.cmf")[0]
    assert header["provenance"]["o1_attn"] == UNKNOWN["provenance"]["o1_attn"]
    assert report.losses[0].kl == pytest.approx(0, abs=1e-6)
    write_arrays(folder / "in.cmf", MODEL.header(), MODEL.arrays(), tokenizer=tiny_tokenizer(), force=True)
    polished_by(folder, train_polish_only=True, output_force=True)
    assert "o1_attn" not in cmf_reader.read(folder / "out.cmf")[0]["provenance"]


def test_a_separate_teacher(folder: Path) -> None:
    teacher = replace(MODEL, F=20, seed=6).write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    report = polished_by(folder, train_teacher=teacher)
    assert report.recipe.teacher == str(teacher)
    assert report.losses[0].kl > 0.05
    assert report.ppl.teacher != pytest.approx(polished_by(folder, output_force=True).ppl.teacher, rel=1e-3)


@pytest.mark.parametrize("change", [{"C": 20}, {"layers": 3}, {"V": 30}])
def test_a_teacher_that_does_not_fit(change: dict[str, int], folder: Path) -> None:
    teacher = replace(MODEL, **change).write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    with pytest.raises(CortiqError) as caught:
        polished_by(folder, train_teacher=teacher)
    assert caught.value.exit_code in (2, 4)
    assert not (folder / "out.cmf").exists()


def test_a_teacher_with_another_tokenizer(folder: Path) -> None:
    teacher = MODEL.write(folder / "teacher.cmf", tokenizer=tiny_tokenizer().replace(b'"a":2', b'"A":2'))
    with pytest.raises(CortiqError, match="tokenizer"):
        polished_by(folder, train_teacher=teacher)
    assert not (folder / "out.cmf").exists()


# Divergence


def test_a_run_that_diverges_keeps_the_best_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({5, 6, 7, 8, 9}))
    events: list[Event] = []
    with pytest.raises(DivergedError) as caught:
        polished_by(folder, events.append, train_steps=20)
    assert caught.value.exit_code == 7
    assert verify_model(folder / "out.cmf") == []
    report = Report.read(folder / "out.cmf.report.json")
    assert (report.outcome, report.steps_run) == ("polished", 9)
    assert report.best_step in (2, 4)
    assert [loss.grad_norm is None for loss in report.losses] == [False] * 4 + [True] * 5
    assert isinstance(events[-1], DoneEvent)
    # What a user was told during the run is in the report too: five skipped steps, and the end.
    assert [e.message for e in events if isinstance(e, WarningEvent)] == report.warnings
    assert sum("skipped" in warning for warning in report.warnings) == 5
    assert any("diverged" in warning for warning in report.warnings)


def test_a_run_that_diverges_before_anything_was_better_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({1, 2, 3, 4, 5}))
    error = refusal(folder, DivergedError, 7, train_steps=20)
    assert "nothing was written" in error.message


def test_one_skipped_step_is_told_and_survived(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "loss_and_gradient", broken_at({3}))
    report = polished_by(folder)
    assert any("step 3" in warning for warning in report.warnings)
    assert report.losses[2].grad_norm is None
    assert report.outcome == "polished"


# Refusals


def test_an_existing_out_needs_force(folder: Path) -> None:
    (folder / "out.cmf").write_bytes(b"something dear")
    error = refusal(folder, ConfigError, 2)
    assert "--force" in error.hint
    polished_by(folder, output_force=True)
    assert verify_model(folder / "out.cmf") == []


def test_a_dry_run_tells_of_an_existing_out(folder: Path) -> None:
    (folder / "out.cmf").write_bytes(b"mine")

    def warned(**changes: Any) -> bool:
        told = pipeline.dry_run(folder / "in.cmf", folder / "out.cmf", settings(folder, **changes))
        return any("--force" in warning for warning in told.warnings)

    assert warned()
    assert not warned(output_force=True)
    assert (folder / "out.cmf").read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="same file"):
        pipeline.dry_run(folder / "in.cmf", folder / "in.cmf", settings(folder))


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_out_may_not_be_the_input(folder: Path, link: Callable[[Path, Path], None] | None) -> None:
    out = folder / "out.cmf"
    if link is None:
        out = folder / "in.cmf"
    else:
        link(folder / "in.cmf", out)
    before = out.read_bytes()
    with pytest.raises(ConfigError) as caught:
        pipeline.run(folder / "in.cmf", out, settings(folder, output_force=True))
    assert caught.value.exit_code == 2
    assert out.read_bytes() == (folder / "in.cmf").read_bytes() == before


@pytest.mark.parametrize("name", ["in.cmf", "out.cmf", "teacher.cmf", "train.txt", "val.txt"])
def test_the_report_may_not_replace_an_input_or_out(folder: Path, name: str) -> None:
    teacher = MODEL.write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    refusal(folder, ConfigError, 2, output_report=folder / name, train_teacher=teacher)


@pytest.mark.parametrize("name", ["teacher.cmf", "train.txt", "val.txt"])
def test_out_may_not_replace_another_input(folder: Path, name: str) -> None:
    """Not even with --force."""
    teacher = MODEL.write(folder / "teacher.cmf", tokenizer=tiny_tokenizer())
    before = (folder / name).read_bytes()
    config = settings(folder, output_force=True, train_teacher=teacher)
    with pytest.raises(ConfigError):
        pipeline.run(folder / "in.cmf", folder / name, config)
    assert (folder / name).read_bytes() == before


def test_a_report_of_an_earlier_run_is_replaced(folder: Path) -> None:
    (folder / "out.cmf.report.json").write_text("old")
    assert polished_by(folder) == Report.read(folder / "out.cmf.report.json")


def test_the_report_goes_where_it_is_told(folder: Path) -> None:
    report = polished_by(folder, output_report=folder / "elsewhere.json")
    assert Report.read(folder / "elsewhere.json") == report
    assert not (folder / "out.cmf.report.json").exists()


def test_a_weight_that_is_not_finite(folder: Path) -> None:
    arrays = MODEL.arrays()
    arrays["model.layers.1.self_attn.o_proj.weight"][3, 4] = np.nan
    write_arrays(folder / "in.cmf", MODEL.header(), arrays, tokenizer=tiny_tokenizer(), force=True)
    error = refusal(folder, NonFiniteWeightsError, 3)
    assert "model.layers.1.self_attn.o_proj.weight" in error.message


def test_a_truncated_file(folder: Path) -> None:
    data = (folder / "in.cmf").read_bytes()
    for length in (0, 3, 100, 4000, len(data) - 1):
        (folder / "in.cmf").write_bytes(data[:length])
        refusal(folder, CmfFormatError, 3)


def test_a_wrong_magic(folder: Path) -> None:
    data = (folder / "in.cmf").read_bytes()
    (folder / "in.cmf").write_bytes(b"GGUF" + data[4:])
    refusal(folder, CmfFormatError, 3)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", SKILL])
def test_a_flipped_byte_in_any_tensor(name: str, folder: Path) -> None:
    """In one that is read, and in one that is only copied."""
    path = folder / "in.cmf"
    with open_model(path) as model:
        at = model.tensors[name].offset_bytes
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    assert name in refusal(folder, CmfFormatError, 3).message


def test_a_model_that_is_not_supported(folder: Path) -> None:
    header = MODEL.header()
    header["arch"]["a_key_of_next_year"] = 3
    write_arrays(folder / "in.cmf", header, MODEL.arrays(), tokenizer=tiny_tokenizer(), force=True)
    assert "a_key_of_next_year" in refusal(folder, UnsupportedModelError, 4).message


def test_windows_that_never_meet_the_kernel(folder: Path) -> None:
    assert "--seq 32" in refusal(folder, ConfigError, 2, train_seq=31).hint
    polished_by(folder, train_seq=32)


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_text_that_is_too_short(name: str, folder: Path) -> None:
    """One token below what a window and its last target need, and exactly that."""
    least = SEQ + 2 if name == "train" else SEQ + 1
    (folder / f"{name}.txt").write_text(tiny_text(least - 1), encoding="utf-8")
    error = refusal(folder, CorpusError, 5)
    assert f"{name}ing" in error.message or f"{name}idation" in error.message
    assert str(least) in error.message
    (folder / f"{name}.txt").write_text(tiny_text(least), encoding="utf-8")
    polished_by(folder)


def test_ids_outside_the_vocabulary(folder: Path) -> None:
    ids = np.arange(1000) % MODEL.V
    ids[77] = MODEL.V
    np.save(folder / "ids.npy", ids)
    error = refusal(folder, CorpusError, 5, corpus_train=folder / "ids.npy")
    assert str(MODEL.V) in error.message
    assert "77" in error.message


def test_text_without_a_tokenizer(folder: Path) -> None:
    write_arrays(folder / "in.cmf", MODEL.header(), MODEL.arrays(), force=True)
    assert "tokenizer" in refusal(folder, TokenizerError, 5).message
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer())
    report = polished_by(folder)
    assert any("tokenizer" in warning for warning in report.warnings)


def test_an_unknown_device(folder: Path) -> None:
    for device in ("tpu9", "mps"):
        assert device in refusal(folder, ConfigError, 2, compute_device=device).message


def test_no_output_directory(folder: Path) -> None:
    with pytest.raises(ConfigError):
        pipeline.run(folder / "in.cmf", folder / "missing" / "out.cmf", settings(folder))


def test_no_such_input(folder: Path) -> None:
    with pytest.raises(ConfigError):
        pipeline.run(folder / "missing.cmf", folder / "out.cmf", settings(folder))


def test_perplexities_are_finite_numbers_or_null(done: Done) -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [n for v in value.values() for n in numbers(v)]
        if isinstance(value, list):
            return [n for v in value for n in numbers(v)]
        return [value] if isinstance(value, float) else []

    assert all(math.isfinite(n) for n in numbers(done.report.model_dump()))
