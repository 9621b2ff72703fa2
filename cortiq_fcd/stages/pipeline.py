"""A polish from the input file to the written one, in order."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from cortiq_fcd.errors import ConfigError, DivergedError, NothingPassedError
from cortiq_fcd.events import DoneEvent, Event, Listener, StageEvent, WarningEvent, ignore
from cortiq_fcd.io.corpus import Corpus, check_lengths, load_corpus
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.io.writer import check_free_space, check_output_path, expected_bytes
from cortiq_fcd.model.conversion import Conversion, resolve_conversion
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.model.weights import FrozenWeights
from cortiq_fcd.stages import dequantize, evaluate, gate, polish, provenance, replica, store
from cortiq_fcd.stages.artefacts import Comparison, Stored
from cortiq_fcd.stages.config import ComputeConfig, PolishConfig
from cortiq_fcd.stages.report import MemoryInfo, Report, ToolInfo
from cortiq_fcd.stages.sentence import is_worse, sentence
from cortiq_fcd.stages.teacher import check_teacher

_DIVERGED = f"training diverged: {polish.MAX_SKIPPED_IN_A_ROW} steps in a row had no finite gradient"
_CALMER = "try a smaller --lr"

StageName = Literal["dequantize", "replica", "gate", "polish", "evaluate", "provenance"]


def run(source: Path, out: Path, config: PolishConfig, listener: Listener = ignore) -> Report:
    """Polish `source` into `out`; returns the report, which is also written beside `out`.

    Raises CortiqError (see `cortiq_fcd.errors`) with `out` as it was, except for a run that diverged after it had found
    something better than the conversion: that is written first.
    """
    progress = _Progress(listener)
    report_path = config.output.report or out.with_name(out.name + ".report.json")
    with open_model(source) as model:
        inputs = [*model.paths, *filter(None, (config.train.teacher, config.corpus.train, config.corpus.val))]
        check_output_path(inputs, out, config.output.force)
        check_output_path([*inputs, out], report_path, True)
        plan = plan_model(model)
        conversion = _conversion(config, plan, model, progress)
        _check_disk(config, plan, conversion, model, out)
        device = _device(config.compute)
        corpus = _corpus(config, model, progress)
        with progress.stage("dequantize", f"{len(plan.shapes)} tensors, {plan.params:,} weights"):
            weights = dequantize.run(model, plan, device)
            teacher_weights = _teacher(config, model, plan, device, progress)
        with progress.stage("replica", f"{len(conversion.converted)} of {len(plan.layers)} layers converted"):
            network = replica.run(conversion, weights, teacher_weights)
        prompts = gate.select_prompts(config.gate, corpus.val, conversion)
        with progress.stage("gate", prompts.skipped and f"skipped: {prompts.skipped}"):
            judged = gate.run(config.gate, prompts, network)
        if prompts.skipped and config.gate.enabled:
            progress.warn(f"the generation gate was skipped: {prompts.skipped}")
        where = evaluate.select_windows(config.train, corpus.val, prompts.offsets, gate.PROMPT_TOKENS)
        with progress.stage("evaluate", "before training"):
            teacher = evaluate.run(config.train, network, where, student=False)
            start = evaluate.run(config.train, network, where, student=True)
        with progress.stage("polish", f"{config.train.steps} steps"):
            trained = polish.run(
                config.train,
                network,
                corpus.train,
                corpus.val,
                judged,
                progress.pass_on,
                judge_every_checkpoint=config.gate.every_checkpoint,
            )
        progress.move("polish", "gate", trained.gate_seconds)
        if config.gate.require_pass and not (judged and trained.passed):
            raise NothingPassedError(
                "no checkpoint passed the generation gate, and --require-pass was given: nothing was written",
                hint=prompts.skipped and f"the gate did not run: {prompts.skipped}",
            )
        if trained.diverged and not trained.best_step:
            raise DivergedError(
                f"{_DIVERGED}. Nothing had beaten the conversion by then: nothing was written", hint=_CALMER
            )
        with progress.stage("evaluate", "after training"):
            stored = store.run(config.output, network) if trained.best_step else Stored({})
            final = evaluate.run(config.train, network, where, student=True) if trained.best_step else start
        progress.warn(*stored.notes)
        story = provenance.Story(
            config=config,
            plan=plan,
            conversion=conversion,
            corpus=corpus,
            trained=trained,
            comparison=Comparison(teacher, start, final),
            gate_skipped=prompts.skipped,
            trainable_params=network.masters.flat.numel(),
            tool=_tool(device),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        with progress.stage("provenance", str(out)):
            written = provenance.run(story, model, out, stored)
        if trained.diverged:
            progress.warn("training diverged: the last steps had no finite gradient")
        progress.warn(*_unmeasured(story))
        report = provenance.build_report(story, model, out, written, progress.timing, _memory(device), progress.notes)
        if is_worse(report):
            progress.warn("the written weights are worse than the conversion on the positions that count")
            report = report.model_copy(update={"warnings": progress.notes})
        provenance.write_report(report, report_path)
    listener(DoneEvent(outcome=report.outcome, output=str(out), report=str(report_path), sentence=sentence(report)))
    if trained.diverged:
        raise DivergedError(
            f"{_DIVERGED}. The best state so far (step {report.best_step}) was written to {out}", hint=_CALMER
        )
    return report


def _conversion(config: PolishConfig, plan: ModelPlan, model: CmfModel, progress: _Progress) -> Conversion:
    o1 = config.o1
    conversion, notes = resolve_conversion(
        plan,
        model.header.get("provenance"),
        layers=o1.layers,
        m=o1.m,
        w=o1.w,
        sink=o1.sink,
        prefill=o1.prefill,
        seq=config.train.seq,
        polish_only=config.train.polish_only,
    )
    progress.warn(*notes)
    return conversion


def _check_disk(config: PolishConfig, plan: ModelPlan, conversion: Conversion, model: CmfModel, out: Path) -> None:
    """ResourceError before any work if OUT would not fit where it goes."""
    names = [name for i in conversion.layers for name in plan.layers[i].trainable]
    dtypes = {name: store.stored_dtype(config.output, plan.shapes[name]) for name in names}
    check_free_space(out, expected_bytes(model, header=model.header, replace=dtypes))


def _corpus(config: PolishConfig, model: CmfModel, progress: _Progress) -> Corpus:
    corpus = load_corpus(
        train=config.corpus.train,
        val=config.corpus.val,
        max_train_bytes=config.corpus.max_train_bytes,
        max_val_bytes=config.corpus.max_val_bytes,
        model=model,
    )
    progress.warn(*corpus.notes, *check_lengths(corpus, config.train.seq, config.train.batch))
    return corpus


def _teacher(
    config: PolishConfig, model: CmfModel, plan: ModelPlan, device: torch.device, progress: _Progress
) -> FrozenWeights | None:
    """The weights of a separate teacher file, if one was given."""
    path = config.train.teacher
    if path is None:
        return None
    with open_model(path) as teacher:
        teacher_plan = plan_model(teacher)
        progress.warn(*check_teacher(teacher, teacher_plan, model, plan))
        return dequantize.run(teacher, teacher_plan, device)


class _Progress:
    """Tells the listener about stages and warnings, and remembers both for the report."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.timing: dict[str, float] = {}
        self.notes: list[str] = []

    @contextmanager
    def stage(self, name: StageName, detail: str) -> Iterator[None]:
        self._listener(StageEvent(stage=name, detail=detail))
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.timing[name] = self.timing.get(name, 0.0) + seconds
        self._listener(StageEvent(stage=name, detail=detail, seconds=seconds))

    def move(self, giver: StageName, taker: StageName, seconds: float) -> None:
        """Count time that was spent inside one stage for another."""
        self.timing[giver] -= seconds
        self.timing[taker] += seconds

    def warn(self, *messages: str) -> None:
        for message in messages:
            self.pass_on(WarningEvent(message=message))

    def pass_on(self, event: Event) -> None:
        """Tell the listener; a warning, whoever gave it, is also kept for the report."""
        if isinstance(event, WarningEvent):
            self.notes.append(event.message)
        self._listener(event)


def _device(config: ComputeConfig) -> torch.device:
    """The device to run on, with the thread count set. Raises ConfigError for one that is not there."""
    torch.set_num_threads(config.threads or _usable_cpus())
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"--device {wanted!r} is not a device", hint="use auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--device {wanted}: the landmark inverse needs 64-bit floats, which this kind of device lacks",
            hint="use --device cpu",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {wanted}: torch finds {torch.cuda.device_count()} CUDA devices", hint="use --device cpu"
        )
    return device


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tool(device: torch.device) -> ToolInfo:
    return ToolInfo(
        name="cortiq-fcd",
        version=version("cortiq-fcd"),
        torch=torch.__version__,
        python=platform.python_version(),
        device=str(device),
        precision="f32",
        threads=torch.get_num_threads(),
    )


def _memory(device: torch.device) -> MemoryInfo:
    peak = None
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = used if sys.platform == "darwin" else used * 1024
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return MemoryInfo(peak_rss_bytes=peak, peak_device_bytes=on_device)


def _unmeasured(story: provenance.Story) -> list[str]:
    """Why numbers of the report are null."""
    reasons = []
    if story.comparison.final.untouched is None:
        reasons.append("ppl.untouched is null: every validation window was used for choosing or judging")
    if story.comparison.final.served is None or math.isnan(story.comparison.final.served):
        reasons.append("ppl.served and kl_served are null: no position of a window comes after the seal")
    return reasons
