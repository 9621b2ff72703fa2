"""Texts of the gate's prompts: what is said, and which of it is marked as said before."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.tokenizer import load_tokenizer
from cortiq_fcd.stages import texts
from cortiq_fcd.stages.artefacts import Evaluation, Gate, Judgement, Trained
from cortiq_fcd.stages.gate import loop_score
from tests.fixtures import Tiny

DEMO = str(files("cortiq_fcd") / "data" / "demo.cmf")


@pytest.mark.parametrize(
    ("ids", "repeated"),
    [
        ([], set()),
        ([1, 2, 3, 4, 5], set()),
        ([7, 7, 7, 7, 7], {1, 2, 3, 4}),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], {5, 6, 7, 8}),
        ([1, 2, 3, 9, 1, 2, 3, 8], set()),  # repeated 3-grams
    ],
)
def test_repeated_tokens(ids: list[int], repeated: set[int]) -> None:
    assert texts.repeated_tokens(ids) == repeated
    assert bool(repeated) == (loop_score(ids) > 0)


def test_spans_are_those_of_the_repeated_words() -> None:
    with open_model(DEMO) as model:
        tokenizer = load_tokenizer(model)
    phrase = " and then she went away"
    prompt, ids = tokenizer.encode("She came,").tolist(), tokenizer.encode(phrase + phrase + " at once.").tolist()
    said = texts.continuation(tokenizer.decode, prompt, ids)
    assert said.text == phrase + phrase + " at once."
    assert [said.text[a:b] for a, b in said.repeats] == [phrase]


def test_characters_of_several_tokens_are_not_cut() -> None:
    with open_model(DEMO) as model:
        tokenizer = load_tokenizer(model)
    ids = tokenizer.encode("雪🙂雪🙂").tolist()
    assert len(ids) > 4, "every character is several tokens"
    said = texts.continuation(tokenizer.decode, tokenizer.encode("é").tolist(), ids)
    assert said.text == "雪🙂雪🙂"
    assert [said.text[a:b] for a, b in said.repeats] == ["雪🙂"]
    half = texts.continuation(tokenizer.decode, [], ids[:2])
    assert half.text == "\ufffd"


def judgement(*continuations: tuple[int, ...]) -> Judgement:
    return Judgement((0.0,) * len(continuations), True, continuations)


def trained(best_step: int, *judgements: tuple[int, Judgement | None]) -> Trained:
    evaluations = tuple(Evaluation(step, 10.0, verdict) for step, verdict in judgements)
    return Trained(best_step, 9.0, 8.0, evaluations, (), True, False, 0.0)


def test_after_is_the_chosen_checkpoint_or_else_the_last_one_judged(tmp_path: Path) -> None:
    prompts = np.arange(100).reshape(1, 100)
    gate = Gate(lambda replica: judgement(), judgement((1, 2)), judgement((3, 4)))
    path = Tiny(layers=1).write(tmp_path / "in.cmf")
    runs = [(0, judgement((9,))), (2, judgement((5,))), (4, judgement((6, 6))), (6, None)]
    with open_model(path) as model:
        chosen = texts.run(model, prompts, gate, trained(2, *runs))
        rejected = texts.run(model, prompts, gate, trained(0, *runs))
        unjudged = texts.run(model, prompts, gate, trained(0, runs[0]))
    assert (chosen.step, rejected.step, unjudged.step) == (2, 4, None)
    (text,) = chosen.prompts
    assert text.prompt.split() == [str(token) for token in range(52, 100)], "a model without a tokenizer shows ids"
    assert [said.text for said in (text.teacher, text.start, text.after) if said] == ["3 4 ", "1 2 ", "5 "]
    assert rejected.prompts[0].after is not None
    assert rejected.prompts[0].after.text == "6 6 "
    assert unjudged.prompts[0].after is None
