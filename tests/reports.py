"""Small report values for the tests of reports, displays and the command line."""

from __future__ import annotations

import math
from typing import Any

from cortiq_fcd.stages.records import RecipeInfo
from cortiq_fcd.stages.report import (
    Continuation,
    CorpusInfo,
    EvalRecord,
    GateEval,
    GateInfo,
    GateTexts,
    KlInfo,
    LossRecord,
    O1Info,
    OutputInfo,
    PolishMemory,
    PplInfo,
    PromptTexts,
    Report,
    SourceInfo,
    ToolInfo,
    Triple,
)

TEXTS = GateTexts(
    step=40,
    prompts=[
        PromptTexts(
            prompt="She came,",
            teacher=Continuation(text=" and went."),
            start=Continuation(text=" and then she went away and then she went away", repeats=[(23, 46)]),
            after=Continuation(text=" and saw.\n\nNobody else was there."),
        ),
        PromptTexts(prompt="He wrote", start=Continuation(text=" to her."), after=Continuation(text=" nothing.")),
    ],
)
PASSED_GATE = GateInfo(
    status="ran",
    threshold=0.35,
    slack=0.1,
    baseline=[0.1, 0.3, 0.0],
    evals=[
        GateEval(step=20, ppl=37.5, scores=None, passed=None),
        GateEval(step=40, ppl=36.0, scores=[0.1, 0.2, 0.0], passed=True),
        GateEval(step=60, ppl=35.9, scores=[0.5, 0.2, 0.0], passed=False),
    ],
    chosen=40,
    texts=TEXTS,
)
REJECTED_GATE = PASSED_GATE.model_copy(
    update={"evals": [GateEval(step=60, ppl=35.9, scores=[0.5, 0.2, 0.0], passed=False)], "chosen": None}
)
SKIPPED_GATE = GateInfo(status="skipped", reason="the validation text has 120 tokens and the gate needs 900",
                        threshold=0.35, slack=0.1)  # fmt: skip
IDENTITY: dict[str, Any] = {
    "outcome": "identity",
    "best_step": 0,
    "ppl": PplInfo(
        teacher=30.0,
        start=41.0,
        best=41.0,
        final=40.9,
        final_windows=Triple(teacher=30.2, start=40.9, final=40.9),
        served=Triple(teacher=30.1, start=41.2, final=41.2),
    ),
}


def sample_report(**changes: Any) -> Report:
    """A polished run of sixty steps that the gate let pass, with some fields changed."""
    values: dict[str, Any] = {
        "outcome": "polished",
        "best_step": 40,
        "steps_run": 60,
        "converted_layers": [0, 1, 2, 3, 5],
        "trainable_params": 885_000,
        "tool": ToolInfo(
            name="cortiq-fcd",
            version="0.1.0",
            torch="2.13.0",
            python="3.11.7",
            device="cpu",
            precision="f32",
            threads=2,
        ),
        "created": "2026-12-01T07:00:00Z",
        "source": SourceInfo(
            path="in.cmf", bytes=2_300_000, dir_hash="0123456789abcdef", arch_name="qwen3", layers=6, params=1_100_000
        ),
        "output": OutputInfo(
            path="out.cmf",
            bytes=4_300_000,
            dir_hash="fedcba9876543210",
            save_dtype="f32",
            tensors_copied=42,
            tensors_written=25,
        ),
        "o1": O1Info(layers="all", m=4, w=2, sink=0, prefill=128),
        "recipe": RecipeInfo(steps=60, lr=3e-4, kl=0.7, eval_every=20, batch=8, seq=256, seed=0),
        "corpus": CorpusInfo(
            train_tokens=900_000, val_tokens=100_000, train_sha256="a" * 64, val_sha256="b" * 64, source="built-in"
        ),
        "ppl": PplInfo(
            teacher=30.0,
            start=41.0,
            best=36.0,
            final=37.0,
            final_windows=Triple(teacher=30.2, start=40.9, final=37.0),
            served=Triple(teacher=30.1, start=41.2, final=36.9),
            untouched=38.5,
        ),
        "kl_served": KlInfo(start=0.30, final=0.237),
        "gate": PASSED_GATE,
        "evals": [EvalRecord(step=step, ppl=ppl) for step, ppl in ((0, 41.0), (20, 37.5), (40, 36.0), (60, 35.9))],
        "losses": [
            LossRecord(step=i, ce=3.6 - 0.1 * math.log(i), kl=0.3 / math.sqrt(i), grad_norm=1 + 1 / i, seconds=0.5)
            for i in range(1, 61)
        ],
        "timing": {"dequantize": 0.2, "replica": 0.5, "polish": 50.1, "gate": 8.2, "provenance": 0.3},
        "memory": PolishMemory(peak_rss_bytes=700_000_000),
        "warnings": ["text beyond 2000000 bytes was cut off"],
    }
    return Report(**(values | changes))
