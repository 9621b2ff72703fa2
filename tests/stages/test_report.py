"""The report refuses numbers that mean nothing, survives its JSON, and tells its outcome in one honest sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cortiq_fcd.stages.report import EvalRecord, GateEval, KlInfo, PplInfo, Provenance, Report, Triple
from cortiq_fcd.stages.sentence import is_worse, sentence
from tests.reports import IDENTITY, PASSED_GATE, REJECTED_GATE, SKIPPED_GATE, sample_report

OUTCOMES: dict[str, dict[str, Any]] = {
    "polished": {},
    "polished, gate skipped": {"gate": SKIPPED_GATE},
    "identity, rejected": IDENTITY | {"gate": REJECTED_GATE},
    "identity, nothing better": IDENTITY | {"gate": SKIPPED_GATE},
    "nothing measured": {"ppl": PplInfo(), "kl_served": KlInfo(), "evals": [], "losses": []},
}


@pytest.mark.parametrize("changes", OUTCOMES.values(), ids=OUTCOMES.keys())
def test_json_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    report = sample_report(**changes)
    path = tmp_path / "out.report.json"
    path.write_text(report.to_json(), encoding="utf-8")
    assert Report.read(path) == report
    assert json.loads(report.to_json())["schema"] == "cortiq-fcd-report/1"


@pytest.mark.parametrize("field", ["trainable_params", "best_step", "timing"])
def test_numbers_that_nothing_can_compute_with_are_not_read(field: str, tmp_path: Path) -> None:
    path = tmp_path / "out.report.json"
    huge = {"polish": 1e306} if field == "timing" else 10**400
    path.write_text(json.dumps(json.loads(sample_report().to_json()) | {field: huge}))
    with pytest.raises(ValueError, match="a number in it is beyond"):
        Report.read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        EvalRecord(step=1, ppl=value)
    with pytest.raises(ValidationError):
        Triple(start=value)
    with pytest.raises(ValidationError):
        GateEval(step=1, ppl=1.0, scores=[0.1, value], passed=True)
    with pytest.raises(ValidationError):
        sample_report(timing={"polish": value})


def test_unknown_fields_are_refused() -> None:
    text = sample_report().to_json().replace('"best_step"', '"best_stepp": 1, "best_step"', 1)
    with pytest.raises(ValidationError, match="best_stepp"):
        Report.model_validate_json(text)


def test_report_has_the_keys_that_the_product_lists() -> None:
    keys = "schema outcome best_step steps_run converted_layers trainable_params tool created source output o1 recipe "
    keys += "corpus ppl kl_served gate evals losses timing memory warnings"
    assert list(json.loads(sample_report().to_json())) == keys.split()


def test_provenance_begins_with_the_ten_keys_other_readers_know() -> None:
    ten = ["steps", "lr", "kl_w", "bs", "seq", "teacher_ppl", "ppl_start", "ppl_final", "best_step", "converted_layers"]
    assert list(Provenance.model_fields)[:10] == ten


def test_sentence_of_a_polish() -> None:
    assert sentence(sample_report()) == (
        "Polished: perplexity of served positions 41.2 -> 36.9 (exact attention: 30.1), KL to the exact model -21 %, "
        "chosen at step 40 of 60; no prompt loops more than before (worst loop score 0.30 -> 0.20)."
    )


def test_sentence_says_when_prompts_loop_more() -> None:
    looser = GateEval(step=40, ppl=36.0, scores=[0.15, 0.3, 0.0], passed=True)
    text = sentence(sample_report(gate=PASSED_GATE.model_copy(update={"evals": [looser]})))
    assert "some prompts loop more than before (worst loop score 0.30, was 0.30, limit 0.35)" in text


def test_sentence_says_when_looping_was_cured() -> None:
    cured = PASSED_GATE.model_copy(update={"baseline": [0.77, 0.3, 0.26]})
    text = sentence(sample_report(gate=cured))
    assert text.endswith("; generated text no longer loops (worst loop score 0.77 -> 0.20, limit 0.35).")


def test_sentence_says_when_the_served_model_got_worse() -> None:
    served = Triple(teacher=30.1, start=41.2, final=43.0)
    report = sample_report(ppl=PplInfo(final_windows=Triple(teacher=30.2, start=40.9, final=37.0), served=served))
    assert is_worse(report)
    assert sentence(report).startswith("Polished, but worse than the conversion where it counts: perplexity of served")


def test_sentence_says_when_only_whole_windows_got_worse() -> None:
    windows = Triple(teacher=30.2, start=40.9, final=42.0)
    report = sample_report(ppl=PplInfo(final_windows=windows, served=Triple(teacher=30.1, start=41.2, final=36.9)))
    assert not is_worse(report)
    assert "over whole windows it rose 40.9 -> 42.0" in sentence(report)


def test_sentence_without_served_numbers_quotes_the_final_windows() -> None:
    ppl = PplInfo(final_windows=Triple(teacher=19.16, start=21.0, final=20.2))
    assert "perplexity of the final windows 21.00 -> 20.20 (exact attention: 19.16)" in sentence(sample_report(ppl=ppl))


def test_sentence_of_a_skipped_gate_has_the_reason() -> None:
    assert sentence(sample_report(gate=SKIPPED_GATE)).endswith(
        "chosen at step 40 of 60; the generation gate was skipped: the validation text has 120 tokens and the gate "
        "needs 900."
    )


def test_sentences_of_identity() -> None:
    rejected = sentence(sample_report(**IDENTITY, gate=REJECTED_GATE))
    assert rejected.startswith("Identity: no checkpoint passed the generation gate, so OUT holds the source weights")
    better = REJECTED_GATE.model_copy(update={"evals": [GateEval(step=60, ppl=50.0, scores=None, passed=None)]})
    nothing = sentence(sample_report(**IDENTITY, gate=better.model_copy(update={"chosen": 0})))
    assert nothing.startswith("Identity: nothing beat the conversion as it was, so OUT holds the source weights")
    skipped = sentence(sample_report(**IDENTITY, gate=SKIPPED_GATE))
    assert "nothing beat the conversion as it was" in skipped
    assert "gate was skipped" in skipped


def test_sentence_with_nothing_measured() -> None:
    text = sentence(sample_report(ppl=PplInfo(), kl_served=KlInfo()))
    assert text.startswith("Polished: perplexity of the final windows was not measured, chosen at step 40 of 60")


def test_sentences_of_polish_only_speak_of_no_conversion() -> None:
    recipe = sample_report().recipe.model_copy(update={"polish_only": True})
    worse = PplInfo(served=Triple(teacher=30.1, start=41.2, final=43.0))
    for changes in ({}, {"ppl": worse}, IDENTITY | {"gate": SKIPPED_GATE}, IDENTITY | {"gate": REJECTED_GATE}):
        assert "conversion" not in sentence(sample_report(recipe=recipe, **changes))


def test_learning_the_text_is_not_called_mending() -> None:
    """Perplexity below the exact model's with a KL that rose: the numbers alone read like a triumph."""
    learned = sample_report(kl_served=KlInfo(start=0.1, final=0.2))
    assert "KL rose, so it learned this kind of text" in sentence(learned)
    assert "KL rose" not in sentence(sample_report(kl_served=KlInfo(start=0.2, final=0.1)))
