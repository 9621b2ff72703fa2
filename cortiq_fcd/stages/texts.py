"""What the gate's prompts were continued with, as text, and which of it the model had said before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from cortiq_fcd.errors import TokenizerError
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.io.tokenizer import load_tokenizer
from cortiq_fcd.model.windows import Ids
from cortiq_fcd.stages.artefacts import Gate, Judgement, Trained
from cortiq_fcd.stages.repetition import NGRAM, ngrams
from cortiq_fcd.stages.report import Continuation, GateTexts, PromptTexts

PROMPT_TAIL_TOKENS = 48
INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character

Decode = Callable[[ArrayLike], str]


def run(model: CmfModel, prompts: Ids, gate: Gate, trained: Trained) -> GateTexts:
    """Texts of prompts [P, T]: the teacher's, the conversion's, the chosen or else last judged checkpoint's."""
    decode = decoder(model)
    judged = [e for e in trained.evaluations if e.step and e.judgement is not None]
    shown = next((e for e in judged if e.step == trained.best_step), judged[-1] if judged else None)
    after = shown.judgement if shown else None

    def said(number: int, judgement: Judgement | None) -> Continuation | None:
        if judgement is None or number >= len(judgement.continuations):
            return None
        return continuation(decode, prompts[number, -PROMPT_TAIL_TOKENS:].tolist(), judgement.continuations[number])

    return GateTexts(
        step=shown.step if shown else None,
        prompts=[
            PromptTexts(
                prompt=decode(prompts[number, -PROMPT_TAIL_TOKENS:]),
                teacher=said(number, gate.exact),
                start=said(number, gate.start),
                after=said(number, after),
            )
            for number in range(len(prompts))
        ],
    )


def continuation(decode: Decode, prompt: list[int], ids: Sequence[int]) -> Continuation:
    """The text of `ids` as it follows the prompt, with the spans that repeat."""
    # Decoded behind the prompt: a decoder may drop the blank at the beginning of a text.
    lengths = [len(decode([*prompt, *ids[:count]]).rstrip(INCOMPLETE)) for count in range(len(ids) + 1)]
    ends = list(accumulate(lengths, max))
    begin, whole = ends[0], decode([*prompt, *ids])
    ends[-1] = len(whole)
    spans: list[tuple[int, int]] = []
    for token in sorted(repeated_tokens(ids)):
        start, stop = ends[token] - begin, ends[token + 1] - begin
        if spans and spans[-1][1] >= start:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        elif stop > start:
            spans.append((start, stop))
    return Continuation(text=whole[begin:], repeats=spans)


def repeated_tokens(ids: Sequence[int]) -> set[int]:
    """Positions inside a 4-gram that occurred before: none at a loop score of 0."""
    seen: set[tuple[int, ...]] = set()
    found: set[int] = set()
    for at, gram in enumerate(ngrams(ids)):
        if gram in seen:
            found.update(range(at, at + NGRAM))
        seen.add(gram)
    return found


def decoder(model: CmfModel) -> Decode:
    """The model's own tokenizer; without one, the ids themselves."""
    try:
        return load_tokenizer(model).decode
    except TokenizerError:
        return lambda ids: "".join(f"{token} " for token in np.asarray(ids).tolist())
