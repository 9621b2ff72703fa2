"""A polish from the input file to the written one, in order."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path

import torch

from cortiq_fcd.errors import DivergedError, NothingPassedError
from cortiq_fcd.events import DoneEvent, Listener, ignore
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.stages import dequantize, evaluate, gate, polish, provenance, replica, store
from cortiq_fcd.stages.artefacts import Comparison, Figures, Gate, Stored, Trained
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.machine import choose_device, memory_info, tool_info
from cortiq_fcd.stages.prepare import Job, prepare
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.sentence import is_worse, sentence

_DIVERGED = f"training diverged: {polish.MAX_SKIPPED_IN_A_ROW} steps in a row had no finite gradient"
_CALMER = "try a smaller --lr"


def run(source: Path, out: Path, config: PolishConfig, listener: Listener = ignore) -> Report:
    """Polish `source` into `out`; returns the report, which is also written beside `out`.

    Raises CortiqError (see `cortiq_fcd.errors`) with `out` as it was, except for a run that diverged after it had found
    something better than the conversion: that is written first.
    """
    progress = Progress(listener)
    device = choose_device(config.compute)
    with open_model(source) as model:
        job = prepare(model, out, config, progress)
        network = _load(job, model, config, device, progress)
        with progress.stage("gate", job.prompts.skipped and f"skipped: {job.prompts.skipped}"):
            judged = gate.run(config.gate, job.prompts, network)
        with progress.stage("evaluate", "before training"):
            teacher = evaluate.run(config.train, network, job.windows, student=False)
            start = evaluate.run(config.train, network, job.windows, student=True)
        trained = _train(job, network, judged, config, progress)
        with progress.stage("evaluate", "after training"):
            # What is measured is what will be stored; untrained weights were measured before.
            stored = store.run(config.output, network) if trained.best_step else Stored({})
            final = evaluate.run(config.train, network, job.windows, student=True) if trained.best_step else start
        progress.warn(*stored.notes)
        story = provenance.Story(
            config=config,
            plan=job.plan,
            conversion=job.conversion,
            corpus=job.corpus,
            trained=trained,
            comparison=Comparison(teacher, start, final),
            gate=judged,
            gate_skipped=job.prompts.skipped,
            trainable_params=network.masters.flat.numel(),
            tool=tool_info(device),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        with progress.stage("provenance", str(out)):
            written = provenance.run(story, model, out, stored)
        if trained.diverged:
            progress.warn("training diverged: the last steps had no finite gradient")
        progress.warn(*_unmeasured(final))
        memory = memory_info(device)
        report = provenance.build_report(story, model, out, written, progress.timing, memory, progress.notes)
        if is_worse(report):
            progress.warn("the written weights are worse than the conversion on the positions that count")
            report = report.model_copy(update={"warnings": progress.notes})
        provenance.write_report(report, job.report_path)
    listener(DoneEvent(outcome=report.outcome, output=str(out), report=str(job.report_path), sentence=sentence(report)))
    if trained.diverged:
        raise DivergedError(
            f"{_DIVERGED}. The best state so far (step {report.best_step}) was written to {out}", hint=_CALMER
        )
    return report


def _load(job: Job, model: CmfModel, config: PolishConfig, device: torch.device, progress: Progress) -> Replica:
    """Teacher and student on the device."""
    plan, conversion = job.plan, job.conversion
    with progress.stage("dequantize", f"{len(plan.shapes)} tensors, {plan.params:,} weights"):
        weights = dequantize.run(model, plan, device)
        teacher = None
        if config.train.teacher is not None and job.teacher_plan is not None:
            with open_model(config.train.teacher) as teacher_model:
                teacher = dequantize.run(teacher_model, job.teacher_plan, device)
    with progress.stage("replica", f"{len(conversion.converted)} of {len(plan.layers)} layers converted"):
        return replica.run(conversion, weights, teacher)


def _train(job: Job, network: Replica, judged: Gate | None, config: PolishConfig, progress: Progress) -> Trained:
    """The training loop; the network's masters end as the chosen state. Raises where nothing may be written."""
    with progress.stage("polish", f"{config.train.steps} steps"):
        trained = polish.run(
            config.train,
            network,
            job.corpus.train,
            job.corpus.val,
            judged,
            progress.pass_on,
            judge_every_checkpoint=config.gate.every_checkpoint,
        )
    progress.move("polish", "gate", trained.gate_seconds)
    if config.gate.require_pass and not trained.passed:
        raise NothingPassedError(
            "no checkpoint passed the generation gate, and --require-pass was given: nothing was written"
        )
    if trained.diverged and not trained.best_step:
        raise DivergedError(
            f"{_DIVERGED}. Nothing had beaten the conversion by then: nothing was written", hint=_CALMER
        )
    return trained


def _unmeasured(final: Figures) -> list[str]:
    """Why numbers of the report are null."""
    reasons = []
    if final.untouched is None:
        reasons.append("ppl.untouched is null: every validation window was used for choosing or judging")
    if math.isnan(final.served):
        reasons.append("ppl.served and kl_served are null: no position of a window comes after the seal")
    return reasons
