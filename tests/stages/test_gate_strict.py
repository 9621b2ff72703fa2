"""The strict profile of the gate: sixteen prompts beside every validation window, and no tight loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortiq_fcd.errors import NothingPassedError
from cortiq_fcd.events import Event, GateEvent
from cortiq_fcd.model.windows import measured_spans, validation_offsets
from cortiq_fcd.stages import gate, pipeline
from cortiq_fcd.stages.config import GateConfig
from cortiq_fcd.stages.profiles import PROFILES
from cortiq_fcd.stages.repetition import loop_score
from tests.fixtures import tiny_text
from tests.oracles import cmf_reader
from tests.stages.test_gate import SETTING
from tests.stages.test_pipeline import furnished, settings

STRICT = PROFILES["strict"]
CONFIG = GateConfig(profile="strict")


def strict_prompts(tokens: int, seq: int = 40, batch: int = 2) -> gate.Prompts:
    return gate.select_prompts(CONFIG, np.arange(tokens), SETTING, measured_spans(tokens, seq, batch))


def test_the_profiles_are_the_documented_ones() -> None:
    standard = PROFILES["standard"]
    assert (standard.prompts, standard.prompt_tokens, standard.new_tokens, standard.strict) == (3, 400, 60, False)
    assert (STRICT.prompts, STRICT.prompt_tokens, STRICT.new_tokens, STRICT.strict) == (16, 400, 128, True)
    assert standard.granularity == pytest.approx(1 / 57)
    assert loop_score([7] * 5 + list(range(100, 155))) == pytest.approx(standard.granularity)
    assert STRICT.granularity == pytest.approx(1 / 125)


@given(tokens=st.integers(600, 40_000), seq=st.integers(2, 700), batch=st.integers(1, 4))
def test_prompts_touch_no_validation_window(tokens: int, seq: int, batch: int) -> None:
    tokens = max(tokens, seq + 1)
    found = strict_prompts(tokens, seq, batch)
    used = np.zeros(tokens, bool)
    for offset in validation_offsets(tokens, seq, 2 * batch) + validation_offsets(tokens, seq, 6 * batch):
        used[offset : offset + seq + 1] = True
    if found.skipped:
        assert f"of {tokens} tokens" in found.skipped
        assert len(found.offsets) == 0
        return
    assert found.ids.shape == (16, 400)
    for offset, row in zip(found.offsets, found.ids, strict=True):
        assert row.tolist() == list(range(offset, offset + 400))
        assert not used[offset : offset + 400].any()
        used[offset : offset + 400] = True  # nor one another


def test_a_text_with_room_for_fifteen_skips_the_gate_with_the_reason() -> None:
    spans = [(0, 41)]
    enough, short = np.arange(41 + 16 * 400), np.arange(41 + 16 * 400 - 1)
    assert len(gate.select_prompts(CONFIG, enough, SETTING, spans).offsets) == 16
    skipped = gate.select_prompts(CONFIG, short, SETTING, spans).skipped
    assert skipped == (
        "the validation text of 6440 tokens has room for 15 prompts of 400 tokens beside the validation windows, and "
        "the strict profile needs 16"
    )


def test_prompts_are_spread_over_the_text() -> None:
    found = strict_prompts(100_000)
    assert found.offsets[0] < 7000
    assert found.offsets[-1] > 90_000
    assert "exact" in gate.select_prompts(CONFIG, np.arange(9000), replace(SETTING, w=500)).skipped


def test_a_tight_loop_fails_whatever_the_score() -> None:
    fine = tuple(range(128))
    caught = (*range(116), *[200, 201, 202] * 4)
    texts = (fine,) * 15 + (caught,)
    open_gate = GateConfig(profile="strict", threshold=1.0, slack=1.0)
    baseline = (0.0,) * 16
    verdict = gate.judgement(open_gate, STRICT, texts, baseline)
    assert (verdict.passed, verdict.tight_loops) == (False, 1)
    assert verdict.continuations == texts
    assert gate.judgement(open_gate, STRICT, (fine,) * 16, baseline).passed
    standard = gate.judgement(GateConfig(), PROFILES["standard"], texts, baseline)
    assert (standard.passed, standard.tight_loops) == (True, 0)


def test_the_thresholds_hold_as_in_the_standard_profile() -> None:
    fine, looping = tuple(range(128)), tuple(list(range(40)) * 2 + list(range(50, 98)))
    score = loop_score(list(looping))
    texts = (looping,) + (fine,) * 15
    for config, passed in ((GateConfig(threshold=score, slack=score), True), (GateConfig(slack=score - 0.01), False)):
        assert gate.judgement(config, STRICT, texts, (0.0,) * 16).passed is passed


def test_a_polish_under_the_strict_profile(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    (folder / "val.txt").write_text(tiny_text(12000, seed=2), encoding="utf-8")
    events: list[Event] = []
    config = settings(folder, gate_profile="strict", train_steps=2)
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", config, events.append)
    told = report.gate
    assert (told.status, told.profile, told.prompts, told.prompt_tokens, told.new_tokens) == (
        "ran",
        "strict",
        16,
        400,
        128,
    )
    assert told.granularity == pytest.approx(1 / 125)
    assert told.baseline is not None
    assert told.teacher is not None
    assert len(told.baseline) == len(told.teacher) == 16
    assert told.teacher_repetition is not None
    assert [text.loop_score for text in told.teacher_repetition.texts] == told.teacher
    first = told.evals[0]
    assert first.repetition is not None
    assert [text.loop_score for text in first.repetition.texts] == told.baseline
    caught = sum(text.tight_loop is not None for text in first.repetition.texts)
    verdict = next(event for event in events if isinstance(event, GateEvent))
    assert verdict.tight_loops == caught
    assert first.passed is (caught == 0)  # threshold and slack are open
    record = cmf_reader.read(folder / "out.cmf")[0]["provenance"]["fcd"]
    assert record["gate"]["profile"] == "strict"


def test_a_short_text_under_the_strict_profile(tmp_path: Path) -> None:
    folder = furnished(tmp_path)  # 1500 validation tokens
    report = pipeline.run(folder / "in.cmf", folder / "out.cmf", settings(folder, gate_profile="strict", train_steps=1))
    assert (report.gate.status, report.gate.profile, report.gate.prompts) == ("skipped", "strict", None)
    assert "the strict profile needs 16" in report.gate.reason
    assert any(report.gate.reason in warning for warning in report.warnings)
    config = settings(folder, gate_profile="strict", gate_require_pass=True, output_force=True)
    with pytest.raises(NothingPassedError, match="the strict profile needs 16") as caught:
        pipeline.run(folder / "in.cmf", folder / "out.cmf", config)
    assert caught.value.exit_code == 10


def test_a_dry_run_counts_what_the_profile_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sizes that the estimate is given; its seconds are those of a busy machine."""
    folder = furnished(tmp_path)
    (folder / "val.txt").write_text(tiny_text(12000, seed=2), encoding="utf-8")
    seen = []
    real = pipeline.duration
    monkeypatch.setattr(pipeline, "duration", lambda sizes, *others: seen.append(sizes) or real(sizes, *others))
    for profile in ("standard", "strict"):
        told = pipeline.dry_run(folder / "in.cmf", folder / "out.cmf", settings(folder, gate_profile=profile))
        assert told.time.gate > 0
    assert [(s.prompts, s.prompt_tokens, s.new_tokens) for s in seen] == [(3, 400, 60), (16, 400, 128)]
