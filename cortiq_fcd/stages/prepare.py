"""Everything that can be known, and refused, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from cortiq_fcd.errors import CortiqError, NothingPassedError
from cortiq_fcd.io.corpus import Corpus, check_lengths, load_corpus
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import check_free_space, check_output_path, expected_bytes
from cortiq_fcd.model.conversion import Conversion, resolve_conversion
from cortiq_fcd.model.plan import ModelPlan, eos_notes, plan_model
from cortiq_fcd.model.windows import measured_spans
from cortiq_fcd.stages import estimate, evaluate, gate, store
from cortiq_fcd.stages.checkpoint import Checkpoints
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.identity import Stamp, contents, run_identity, stamp
from cortiq_fcd.stages.places import check_places, read_by
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.teacher import check_teacher


@dataclass(frozen=True)
class Job:
    """A polish that can begin."""

    plan: ModelPlan
    teacher_plan: ModelPlan | None  # of a separate teacher file
    conversion: Conversion
    corpus: Corpus
    prompts: gate.Prompts
    windows: evaluate.Windows
    report_path: Path
    stamp: Stamp
    checkpoints: Checkpoints
    sizes: estimate.Sizes
    out_bytes: int


def prepare(
    model: AnyModel,
    out: Path,
    config: PolishConfig,
    device: torch.device,
    progress: Progress,
    protected: Iterable[Path] = (),
) -> Job:
    """Check paths, model, layers, teacher, disk, text and gate. Raises CortiqError; nothing has been written then.

    `protected`: more files that may not be written.
    """
    stamped = stamp(model)
    inputs = read_by(model, config, protected)
    report_path = check_places(inputs, out, config)
    plan = plan_model(model)
    progress.warn(*eos_notes(model.header, plan))
    conversion = _conversion(config, plan, model, progress)
    teacher_plan, teacher_contents = _teacher(config, plan, model, out, progress)
    out_bytes = _check_disk(config, plan, conversion, model, out)
    corpus = _corpus(config, model, progress)
    train = config.train
    taken = measured_spans(len(corpus.val), train.seq, train.batch)
    prompts = gate.select_prompts(config.gate, corpus.val, conversion, taken)
    if prompts.skipped and config.gate.require_pass:
        raise NothingPassedError(
            f"--require-pass was given, and the generation gate can't run: {prompts.skipped}. Nothing was written",
            hint="give a longer --val-corpus, or leave out --require-pass",
        )
    if prompts.skipped and config.gate.enabled:
        progress.warn(f"the generation gate was skipped: {prompts.skipped}")
    profile = prompts.profile
    windows = evaluate.select_windows(train, corpus.val, prompts.offsets, profile.prompt_tokens)
    checkpoints = Checkpoints(out, run_identity(model, teacher_contents, corpus, conversion, config, device))
    check_output_path(inputs, out, config.output.force or is_own(out, checkpoints))
    sizes = estimate.Sizes(
        plan, teacher_plan, conversion, train, len(prompts.offsets), profile.prompt_tokens, profile.new_tokens
    )
    return Job(
        plan,
        teacher_plan,
        conversion,
        corpus,
        prompts,
        windows,
        report_path,
        stamped,
        checkpoints,
        sizes,
        out_bytes,
    )


def is_own(out: Path, checkpoints: Checkpoints) -> bool:
    """Whether `out` was written by this very run, in a process that was killed before it could end."""
    try:
        with open_model(out) as model:
            provenance = model.header.get("provenance") or {}
            return checkpoints.has_announced(provenance.get("fcd"))
    except CortiqError:
        return False


def _conversion(config: PolishConfig, plan: ModelPlan, model: AnyModel, progress: Progress) -> Conversion:
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


def _teacher(
    config: PolishConfig, plan: ModelPlan, model: AnyModel, out: Path, progress: Progress
) -> tuple[ModelPlan | None, str | None]:
    """The plan of a separate teacher file, if one was given and can teach this model, and the hash of what it holds."""
    path = config.train.teacher
    if path is None:
        return None, None
    with open_model(path) as teacher:
        check_places(list(teacher.paths), out, config)  # every shard of it
        teacher_plan = plan_model(teacher)
        progress.warn(*check_teacher(teacher, teacher_plan, model, plan))
        return teacher_plan, contents(teacher)


def _check_disk(config: PolishConfig, plan: ModelPlan, conversion: Conversion, model: AnyModel, out: Path) -> int:
    """Size of OUT in bytes; ResourceError if it would not fit where it goes."""
    names = [name for i in conversion.layers for name in plan.layers[i].trainable]
    dtypes = {name: store.stored_dtype(config.output, plan.shapes[name]) for name in names}
    nbytes = expected_bytes(model, header=model.header, replace=dtypes)
    check_free_space(out, nbytes)
    return nbytes


def _corpus(config: PolishConfig, model: AnyModel, progress: Progress) -> Corpus:
    corpus = load_corpus(
        train=config.corpus.train,
        val=config.corpus.val,
        max_train_bytes=config.corpus.max_train_bytes,
        max_val_bytes=config.corpus.max_val_bytes,
        model=model,
    )
    progress.warn(*corpus.notes, *check_lengths(corpus, config.train.seq, config.train.batch))
    return corpus
