"""`gate`: the generation gate alone, over a file, or over a file against the one that it was made from."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from cortiq_fcd.events import GateEvent, Listener, ignore
from cortiq_fcd.io.corpus import load_text
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.windows import measured_spans
from cortiq_fcd.stages import gate
from cortiq_fcd.stages.artefacts import Judgement
from cortiq_fcd.stages.config import GateConfig, PolishConfig
from cortiq_fcd.stages.gate import Prompts
from cortiq_fcd.stages.machine import choose_device, memory_info, tool_info
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.reading import Reading, now, open_reading, source_info, text_info
from cortiq_fcd.stages.readings import GateReport, PromptVerdict
from cortiq_fcd.stages.repetition import measured
from cortiq_fcd.stages.report import Repetition, SourceInfo
from cortiq_fcd.stages.teacher import check_teacher
from cortiq_fcd.stages.texts import PROMPT_TAIL_TOKENS, continuation, decoder

# Windows of text play no part in what a prompt's own length seals: so long that no setting is too large for them.
ANY_SEQ = 1 << 20
PREFILL = ANY_SEQ // 2


@dataclass(frozen=True)
class _Spoken:
    """Verdicts over the file, over --before, and over exact attention (null where it is not another kind)."""

    file: Judgement
    before: Judgement | None
    exact: Judgement | None


def run(
    file: Path, config: PolishConfig, text: Path | None, before: Path | None, listener: Listener = ignore
) -> GateReport:
    """Judge `file` on prompts of a text (null: the built-in one). `before`: the file whose scores are the baseline, run
    with the O(1) setting of `file`, as a polish does; null: the file's own scores, so that the threshold alone decides.

    Raises CortiqError (see `cortiq_fcd.errors`).
    """
    progress = Progress(listener)
    device = choose_device(config.compute)
    train, settings = config.train, config.gate.model_copy(update={"enabled": True})
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(open_model(file))
        other = stack.enter_context(open_model(before)) if before else None
        reading = open_reading(model, config.o1, ANY_SEQ, PREFILL, progress)
        base = _base(other, reading, progress) if other else None
        read = load_text(text=text, max_bytes=config.corpus.max_val_bytes, model=model)
        progress.warn(*read.notes)
        taken = measured_spans(len(read.ids), train.seq, train.batch) if len(read.ids) > train.seq else []
        prompts = gate.select_prompts(settings, read.ids, reading.conversion, taken)
        spoken = None if prompts.skipped else _speak(settings, prompts, reading, base, device, progress)
        verdicts = _verdicts(settings, prompts, spoken, model) if spoken else []
    return GateReport(
        tool=tool_info(device),
        created=now(),
        file=source_info(model, reading.plan),
        before=_info(base),
        o1=reading.o1(prompts.profile.prompt_tokens),
        text=text_info(read),
        status="skipped" if prompts.skipped else "ran",
        reason=prompts.skipped,
        passed=spoken.file.passed if spoken else None,
        profile=settings.profile,
        threshold=settings.threshold,
        slack=settings.slack,
        prompt_tokens=prompts.profile.prompt_tokens,
        new_tokens=prompts.profile.new_tokens,
        granularity=prompts.profile.granularity,
        scores=_scores(spoken.file if spoken else None),
        exact=_scores(spoken.exact if spoken else None),
        baseline=_scores(spoken.before if spoken else None),
        tight_loops=_tight_loops(spoken),
        repetition=_repetition(spoken.file if spoken else None),
        exact_repetition=_repetition(spoken.exact if spoken else None),
        before_repetition=_repetition(spoken.before if spoken else None),
        prompts=verdicts,
        memory=memory_info(device),
        warnings=progress.notes,
    )


def _base(other: CmfModel, reading: Reading, progress: Progress) -> Reading:
    """--before, with the attention of the file. Raises as `check_teacher`."""
    plan = plan_model(other)
    option, hint = "--before", "give the file that this one was polished from"
    progress.warn(*check_teacher(other, plan, reading.model, reading.plan, option=option, hint=hint))
    return Reading(other, plan, reading.conversion, reading.exact_only)


def _speak(
    config: GateConfig,
    prompts: Prompts,
    reading: Reading,
    base: Reading | None,
    device: torch.device,
    progress: Progress,
) -> _Spoken:
    """Decode, one model in memory at a time."""
    before = exact = None
    if base is not None:
        network = base.load(device, progress)
        with progress.stage("gate", "the baseline"):
            before = gate.judgement(config, prompts.profile, gate.continuations(prompts, network))
            exact = None if reading.exact_only else gate.continuations(prompts, network, student=False)
        del network
    network = reading.load(device, progress)
    with progress.stage("gate", f"{len(prompts.offsets)} prompts, {prompts.profile.new_tokens} tokens each"):
        file = gate.judgement(
            config, prompts.profile, gate.continuations(prompts, network), before.scores if before else None
        )
        if base is None and not reading.exact_only:
            exact = gate.continuations(prompts, network, student=False)
    scores, caught = list(file.scores), file.tight_loops
    progress.pass_on(GateEvent(step=0, scores=scores, passed=file.passed, tight_loops=caught))
    return _Spoken(file, before, gate.judgement(config, prompts.profile, exact) if exact is not None else None)


def _verdicts(config: GateConfig, prompts: Prompts, spoken: _Spoken, model: CmfModel) -> list[PromptVerdict]:
    decode = decoder(model)
    before = (spoken.before or spoken.file).scores
    found = []
    for number, ids in enumerate(spoken.file.continuations):
        tail = prompts.ids[number, -PROMPT_TAIL_TOKENS:].tolist()
        said = [
            continuation(decode, tail, judgement.continuations[number]) if judgement else None
            for judgement in (spoken.file, spoken.exact, spoken.before)
        ]
        verdict = gate.judgement(config, prompts.profile, (ids,), (before[number],))
        assert said[0] is not None
        found.append(
            PromptVerdict(
                offset=prompts.offsets[number],
                prompt=decode(tail),
                ids=list(ids),
                text=said[0],
                exact=said[1],
                before=said[2],
                passed=verdict.passed,
            )
        )
    return found


def _info(reading: Reading | None) -> SourceInfo | None:
    return source_info(reading.model, reading.plan) if reading else None


def _scores(judgement: Judgement | None) -> list[float] | None:
    return list(judgement.scores) if judgement else None


def _repetition(judgement: Judgement | None) -> Repetition | None:
    return measured(judgement.continuations) if judgement else None


def _tight_loops(spoken: _Spoken | None) -> int | None:
    found = _repetition(spoken.file) if spoken else None
    return sum(text.tight_loop is not None for text in found.texts) if found else None
