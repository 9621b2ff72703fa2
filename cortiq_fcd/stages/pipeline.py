"""A polish from the input file to the written one, in order."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from cortiq_fcd.errors import CortiqError, DivergedError, LostRankError, NothingPassedError
from cortiq_fcd.events import DoneEvent, Listener, ignore
from cortiq_fcd.io.paths import printable
from cortiq_fcd.io.planned import AnyModel, PlannedModel
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.io.writer import WrittenFile
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.streaming import Room
from cortiq_fcd.stages import choose, dequantize, estimate, evaluate, gate, polish, provenance, replica, store, texts
from cortiq_fcd.stages.artefacts import Before, Comparison, Figures, Gate, Stored, Trained
from cortiq_fcd.stages.best import BestOnDisk
from cortiq_fcd.stages.checkpoint import Checkpoint
from cortiq_fcd.stages.checkpoint_folder import MOMENTS
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.durations import duration, what_is_tried
from cortiq_fcd.stages.estimate import Forecast
from cortiq_fcd.stages.identity import check_unchanged
from cortiq_fcd.stages.interrupt import Interruption
from cortiq_fcd.stages.keeper import CheckpointKeeper
from cortiq_fcd.stages.logs import open_logs
from cortiq_fcd.stages.machine import choose_device, memory_info, memory_of_ranks, most_memory, tool_info
from cortiq_fcd.stages.prepare import Job, is_own, prepare
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.report import LayerCost, MemoryPlan, PolishMemory, Report
from cortiq_fcd.stages.resume import find_checkpoint
from cortiq_fcd.stages.savings import describe, layers_streamed
from cortiq_fcd.stages.sentence import is_worse, sentence
from cortiq_fcd.stages.traffic import ranks_info

_DIVERGED = f"training diverged: {polish.MAX_SKIPPED_IN_A_ROW} steps in a row could not be used"
_CALMER = "try a smaller --lr"
PREPARING = "checking the model and the text, sizing the run"


def run(
    source: Path,
    out: Path,
    config: PolishConfig,
    listener: Listener = ignore,
    interruption: Interruption | None = None,
    ranks: Ranks = ALONE,
    *,
    protected: Iterable[Path] = (),
) -> Report:
    """Polish `source` into `out`; returns the report, which is also written beside `out`. Of several `ranks`, which all
    call this, rank 0 alone writes.

    A run that ends early leaves its checkpoints in `out`.partial and goes on from there the next time. `interruption`:
    what has been asked for by signals, if the caller handles them. `protected`: files beside those that `config` names
    which may not be written, such as the one that `config` was read from.

    Raises CortiqError (see `cortiq_fcd.errors`) with `out` as it was, except for a run that diverged after it had found
    something better than the conversion: that is written first. Raises Interrupted when asked to stop.
    """
    progress = Progress(listener)
    interruption = interruption or Interruption()
    device = choose_device(config.compute, ranks)
    with open_model(source) as model:
        config, costs = choose.settle(model, out, config, device, progress, protected, ranks)
        with progress.stage("prepare", PREPARING):
            job = prepare(model, out, config, device, progress, protected, ranks)
        estimate.check_fits(job.sizes, device, job.memory)
        writing = _writing(job, out, config, progress) if ranks.rank == 0 else contextlib.nullcontext()
        with writing, _teacher_model(config) as teacher:
            report, diverged = _polish(job, model, teacher, out, config, costs, device, interruption, progress, ranks)
    output, told = printable(out), printable(job.report_path)
    listener(DoneEvent(outcome=report.outcome, output=output, report=told, sentence=sentence(report)))
    if diverged:
        raise DivergedError(
            f"{_DIVERGED}. The best state so far (step {report.best_step}) was written to {out}", hint=_CALMER
        )
    return report


@contextlib.contextmanager
def _writing(job: Job, out: Path, config: PolishConfig, progress: Progress) -> Iterator[None]:
    """The places that only one process may write in, held and open inside the block."""
    room = estimate.disk(job.sizes, job.savings, out, job.out_bytes)
    if room.free < room.out + room.checkpoints:
        sizes = f"OUT needs {room.out:,} bytes, checkpoints up to {room.checkpoints:,}, and {room.free:,} are free"
        progress.warn(f"{sizes}: some checkpoints may be missing")
    with job.checkpoints.at_work(), progress.logged(open_logs(config.output)):
        yield


def dry_run(
    source: Path,
    out: Path,
    config: PolishConfig,
    listener: Listener = ignore,
    ranks: Ranks = ALONE,
    *,
    protected: Iterable[Path] = (),
) -> Forecast:
    """What `run` would do and need. All checks of `run` are made; nothing is written. Raises as `run` does, but
    for an `out` that exists: a warning."""
    with open_model(source) as model:
        return forecast(model, out, config, listener, ranks, protected=protected)


def forecast(
    model: AnyModel,
    out: Path,
    config: PolishConfig,
    listener: Listener = ignore,
    ranks: Ranks = ALONE,
    *,
    protected: Iterable[Path] = (),
) -> Forecast:
    """As `dry_run`, of a file that is open, or not written yet."""
    progress = Progress(listener)
    device = choose_device(config.compute, ranks)
    # An OUT that is there is no obstacle to a forecast, whatever else --force can't help with is.
    config = choose.stand_in(model, config, progress)
    allowed = config.model_copy(update={"output": config.output.model_copy(update={"force": True})})
    lacks_force = os.path.lexists(out) and not config.output.force
    with progress.stage("prepare", PREPARING):
        job = prepare(model, out, allowed if lacks_force else config, device, progress, protected, ranks)
    if lacks_force and not is_own(out, job.checkpoints):
        progress.warn(f"{out} exists already: the run needs --force to replace it, or another name")
    resumes_after = _resumes_after(job, config)
    with progress.stage("estimate", f"measuring {what_is_tried(job.sizes.train)} on a few layers"):
        time = duration(job.sizes, job.savings, model if isinstance(model, CmfModel) else None, device)
        fits = "" if job.memory.fits else estimate.what_fits(job.sizes, device)
    return Forecast(
        layers=list(job.conversion.layers),
        trainable_params=job.sizes.trained,
        resumes_after_step=resumes_after,
        memory=job.memory,
        savings=describe(job.savings, job.plan, job.teacher_plan, job.conversion),
        disk=estimate.disk(job.sizes, job.savings, out, job.out_bytes),
        time=time,
        fits=fits,
        warnings=progress.notes,
    )


def check(model: PlannedModel, out: Path, config: PolishConfig, *, protected: Iterable[Path] = ()) -> int:
    """Refuse, before `model` is written, what `run` would refuse then. The size of `out` in bytes."""
    progress = Progress(ignore)
    device = choose_device(config.compute)
    job = prepare(model, out, choose.stand_in(model, config, progress), device, progress, protected)
    if config.output.resume:
        find_checkpoint(job.checkpoints, config.output, progress)
    estimate.check_fits(job.sizes, device, job.memory)
    return job.out_bytes


def _resumes_after(job: Job, config: PolishConfig) -> int | None:
    """The step after which a run would go on; its tensors are not kept."""
    found = job.checkpoints.find().checkpoint if config.output.resume is not False else None
    return found.state.record.step if found else None


def _teacher_model(config: PolishConfig) -> contextlib.AbstractContextManager[CmfModel | None]:
    """The teacher's file, if it has one of its own."""
    return contextlib.nullcontext() if config.train.teacher is None else open_model(config.train.teacher)


def _polish(
    job: Job,
    model: CmfModel,
    teacher_model: CmfModel | None,
    out: Path,
    config: PolishConfig,
    costs: list[LayerCost] | None,
    device: torch.device,
    interruption: Interruption,
    progress: Progress,
    ranks: Ranks,
) -> tuple[Report, bool]:
    """From the weights to the written files: the report, and whether the run diverged."""
    checkpoint = find_checkpoint(job.checkpoints, config.output, progress, ranks)
    interruption.saved_step = job.checkpoints.saved_step
    network = _load(job, model, teacher_model, device, progress, ranks)
    before = checkpoint.before if checkpoint else _measure_before(job, network, config, progress, ranks)
    judged = _gate(before, job, config, ranks)
    if judged and (told := gate.loops_of_exact(config.gate, judged.exact)):
        progress.warn(told)
    trained = _train(job, network, before, judged, checkpoint, config, interruption, progress, ranks)
    del checkpoint
    with progress.stage("evaluate", "after training"):
        # What is measured is what will be stored; untrained weights were measured before.
        stored = store.run(config.output, network) if trained.best_step else Stored({})
        final = before.start
        if trained.best_step:
            final = evaluate.run(config.train, network, job.windows, ranks, student=True)
    memory = memory_of_ranks(device, ranks)
    if ranks.rank:
        return Report.model_validate_json(ranks.tell("")), trained.diverged
    progress.warn(*stored.notes)
    story = provenance.Story(
        config=config,
        plan=job.plan,
        conversion=job.conversion,
        corpus=job.corpus,
        trained=trained,
        comparison=Comparison(before.teacher, before.start, final),
        gate=judged,
        gate_skipped=job.prompts.skipped,
        texts=texts.run(model, job.prompts.ids, judged, trained) if judged else None,
        trainable_params=network.masters.flat.numel(),
        tool=tool_info(device, ranks),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        layer_costs=costs,
    )
    with progress.stage("provenance", printable(out)):
        written = _write(story, job, model, out, stored)
    if trained.diverged:
        progress.warn("training diverged: the last steps could not be used")
    progress.warn(*_unmeasured(final))
    memory[0] = memory_info(device)  # once more: the other ranks have done their part
    most = PolishMemory(**most_memory(memory).model_dump(), plan=_memory_plan(job))
    report = provenance.build_report(story, model, out, written, progress.timing, most, progress.notes)
    if ranks.world > 1:
        tool = report.tool.model_copy(update={"ranks": ranks_info(job.sizes, memory)})
        report = report.model_copy(update={"tool": tool})
    if is_worse(report):
        progress.warn("the written weights are worse than the conversion on the positions that count")
        report = report.model_copy(update={"warnings": progress.notes})
    _write_report(report, job.report_path, out)
    if not trained.diverged:
        progress.warn(*job.checkpoints.clear())
    ranks.tell(report.to_json())
    return report, trained.diverged


def _load(
    job: Job,
    model: CmfModel,
    teacher_model: CmfModel | None,
    device: torch.device,
    progress: Progress,
    ranks: Ranks,
) -> Replica:
    """Teacher and student on the device. What is streamed is read from the models as long as the replica is used."""
    plan, conversion, savings = job.plan, job.conversion, job.savings
    room, divided = Room(job.memory.room), ranks if job.sizes.sharding.model else None
    with progress.stage("dequantize", f"{len(plan.shapes)} tensors, {plan.params:,} weights"):
        weights = dequantize.run(model, plan, device, savings.streamed, room, divided)
        teacher = None
        if teacher_model is not None and job.teacher_plan is not None:
            streamed = savings.teacher_streamed
            teacher = dequantize.run(teacher_model, job.teacher_plan, device, streamed, room, divided)
    detail = f"{len(conversion.converted)} of {len(plan.layers)} layers converted"
    if job.savings.on_disk:
        detail += f"; {describe(savings, plan, job.teacher_plan, conversion)}"
    if ranks.world > 1:
        detail += f"; {job.sizes.sharding}"
    with progress.stage("replica", detail):
        return replica.run(
            conversion, weights, teacher, ranks, savings.recomputed, shard_optimizer=job.sizes.sharding.optimizer
        )


def _memory_plan(job: Job) -> MemoryPlan:
    savings, teacher = job.savings, job.teacher_plan
    return MemoryPlan(
        budget_bytes=job.memory.budget,
        estimated_bytes=job.memory.peak,
        layers_streamed=layers_streamed(savings, job.conversion, teacher),
        teacher_layers_streamed=None if teacher is None else len({i for i, _ in savings.teacher_streamed}),
        layers_recomputed=len(savings.recomputed),
        best_state="disk" if savings.on_disk else "memory",
        moments="disk" if savings.moments_on_disk else "memory",
    )


def _measure_before(job: Job, network: Replica, config: PolishConfig, progress: Progress, ranks: Ranks) -> Before:
    """The gate's baseline, and the figures of the teacher and of the conversion as it is."""
    with progress.stage("gate", job.prompts.skipped and f"skipped: {job.prompts.skipped}"):
        judged = gate.run(config.gate, job.prompts, network, ranks)
    with progress.stage("evaluate", "before training"):
        rows = evaluate.TeacherRows()
        teacher = evaluate.run(config.train, network, job.windows, ranks, student=False, teacher=rows)
        start = evaluate.run(config.train, network, job.windows, ranks, student=True, teacher=rows)
    return Before(judged.start if judged else None, judged.exact if judged else None, teacher, start)


def _gate(before: Before, job: Job, config: PolishConfig, ranks: Ranks) -> Gate | None:
    """The gate against a baseline that is known."""
    if before.gate is None or before.exact is None:
        return None
    return gate.gate_against(config.gate, job.prompts, before.gate, before.exact, ranks)


def _train(
    job: Job,
    network: Replica,
    before: Before,
    judged: Gate | None,
    checkpoint: Checkpoint | None,
    config: PolishConfig,
    interruption: Interruption,
    progress: Progress,
    ranks: Ranks,
) -> Trained:
    """The training loop; the network's masters end as the chosen state. Raises where nothing may be written."""
    minutes = config.output.checkpoint_minutes
    on_disk, folder = job.savings.on_disk, job.checkpoints.folder
    keeper = CheckpointKeeper(job.checkpoints, before, minutes, interruption, progress.warn, ranks, copies=not on_disk)
    went_on = f"after step {checkpoint.state.record.step} of " if checkpoint else ""
    with progress.stage("polish", f"{went_on}{config.train.steps} steps"), interruption.patience():
        try:
            trained = polish.run(
                config.train,
                network,
                job.corpus.train,
                job.corpus.val,
                judged,
                progress.pass_on,
                judge_every_checkpoint=config.gate.every_checkpoint,
                keeper=keeper,
                resumed=checkpoint.state if checkpoint else None,
                ranks=ranks,
                shard_optimizer=job.sizes.sharding.optimizer,
                best=BestOnDisk(folder) if on_disk else None,
                moments_file=folder / MOMENTS if job.savings.moments_on_disk else None,
            )
        except LostRankError:
            keeper.finish()  # what is being written is whole before this process ends
            raise
        keeper.finish()
    progress.move("polish", "gate", trained.gate_seconds)
    progress.phases("polish", network.clock.seconds)
    if config.gate.require_pass and not trained.passed:
        raise NothingPassedError(
            "no checkpoint passed the generation gate, and --require-pass was given: nothing was written",
            hint="without --require-pass the same command writes the identity; it goes on from the last checkpoint",
        )
    if trained.diverged and not trained.best_step:
        raise DivergedError(
            f"{_DIVERGED}. Nothing had beaten the conversion by then: nothing was written", hint=_CALMER
        )
    return trained


def _write(story: provenance.Story, job: Job, model: CmfModel, out: Path, stored: Stored) -> WrittenFile:
    """OUT, from a source that is still what it was."""
    check_unchanged(model, job.stamp)
    if is_own(out, job.checkpoints):
        # A process of this run was killed between OUT and its report: the same bytes are written again.
        output = story.config.output.model_copy(update={"force": True})
        story = replace(story, config=story.config.model_copy(update={"output": output}))
    job.checkpoints.announce(provenance.record(story, model).model_dump(mode="json", by_alias=True))
    return provenance.run(story, model, out, stored)


def _write_report(report: Report, path: Path, out: Path) -> None:
    """The report; a failure says that OUT is there all the same."""
    try:
        provenance.write_report(report, path)
    except CortiqError as error:
        raise type(error)(
            f"{error.message}: the report. {out} itself is written and whole", hint="see cortiq-fcd report"
        ) from error


def _unmeasured(final: Figures) -> list[str]:
    """Why numbers of the report are null."""
    reasons = []
    if final.untouched is None:
        reasons.append("ppl.untouched is null: every validation window was used for choosing or judging")
    if math.isnan(final.served):
        reasons.append("ppl.served and kl_served are null: no position of a window comes after the seal")
    return reasons
