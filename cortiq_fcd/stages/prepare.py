"""Everything that can be known, and refused, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from cortiq_fcd.errors import ConfigError, CortiqError, NothingPassedError
from cortiq_fcd.io.corpus import Corpus, check_lengths, load_corpus
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import check_free_space, check_output_path, expected_bytes
from cortiq_fcd.model.conversion import Conversion, resolve_conversion, seal_choices
from cortiq_fcd.model.plan import ModelPlan, eos_notes, plan_model
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.windows import measured_spans
from cortiq_fcd.stages import capacity, dequantize, evaluate, gate, store
from cortiq_fcd.stages.checkpoint import Checkpoints
from cortiq_fcd.stages.config import PolishConfig, TrainConfig
from cortiq_fcd.stages.estimate import Memory, settle
from cortiq_fcd.stages.identity import Stamp, check_agreement, contents, run_identity, stamp
from cortiq_fcd.stages.places import check_places, read_by
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.savings import Savings, describe
from cortiq_fcd.stages.sharding import check_sharding, idle_options, sharding
from cortiq_fcd.stages.teacher import check_teacher
from cortiq_fcd.stages.works import Sizes


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
    sizes: Sizes
    memory: Memory
    savings: Savings
    out_bytes: int


def prepare(
    model: AnyModel,
    out: Path,
    config: PolishConfig,
    device: torch.device,
    progress: Progress,
    protected: Iterable[Path] = (),
    ranks: Ranks = ALONE,
) -> Job:
    """Check paths, model, layers, teacher, disk, text and gate. Raises CortiqError; nothing has been written then.

    `protected`: more files that may not be written. Only rank 0 writes, and looks at the places for that.
    """
    check_batch(config.train, ranks)
    if ranks.world > 1 and config.compute.memory_budget is not None:
        raise ConfigError(
            f"--memory-budget: {ranks.world} processes were started, and a budget works in one alone",
            hint="leave out --memory-budget, or start one process",
        )
    check_sharding(config, ranks)
    progress.warn(*idle_options(config.compute, ranks))
    writes = ranks.rank == 0
    stamped = stamp(model)
    inputs = read_by(model, config, protected)
    report_path = check_places(inputs, out, config) if writes else out
    plan = plan_model(model)
    progress.warn(*eos_notes(model.header, plan))
    conversion, notes = conversion_of(config, plan, model)
    progress.warn(*notes)
    if config.train.seals == "varied" and not seal_choices(conversion, config.train.seq):
        progress.warn(f"--seals varied: windows of {config.train.seq} tokens leave one seal point alone")
    teacher_plan, teacher_contents = _teacher(config, plan, model, out if writes else None, progress)
    out_bytes = _check_disk(config, plan, conversion, model, out) if writes else 0
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
    identity = run_identity(model, teacher_contents, corpus, conversion, config, device, ranks)
    check_agreement(identity, ranks)
    checkpoints = Checkpoints(out, identity)
    if writes:
        check_output_path(inputs, out, config.output.force or is_own(out, checkpoints))
    own = train.model_copy(update={"batch": train.batch // ranks.world})
    sizes = Sizes(
        plan,
        teacher_plan,
        conversion,
        own,
        -(-len(prompts.offsets) // ranks.world),
        profile.prompt_tokens,
        profile.new_tokens,
        dequantize.unpack_bytes(model, plan),
        sharding(config.compute, ranks),
    )
    capacity.trim()  # reading a text leaves much freed memory behind
    memory, savings = settle(sizes, device, config.compute.memory_budget)
    if savings.on_disk and config.compute.memory_budget is None and memory.fits:
        told = describe(savings, plan, teacher_plan, conversion)
        progress.warn(f"memory is too small to hold everything, which takes time: {told}")
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
        memory,
        savings,
        out_bytes,
    )


def check_batch(config: TrainConfig, ranks: Ranks) -> None:
    """ConfigError unless every rank gets as many windows of a step."""
    if config.batch % ranks.world:
        raise ConfigError(
            f"--batch {config.batch}: the windows of a step can't be divided among {ranks.world} processes",
            hint=f"use a multiple of {ranks.world}, or fewer processes",
        )


def is_own(out: Path, checkpoints: Checkpoints) -> bool:
    """Whether `out` was written by this very run, in a process that was killed before it could end."""
    try:
        with open_model(out) as model:
            provenance = model.header.get("provenance") or {}
            return checkpoints.has_announced(provenance.get("fcd"))
    except CortiqError:
        return False


def conversion_of(config: PolishConfig, plan: ModelPlan, model: AnyModel) -> tuple[Conversion, list[str]]:
    """The O(1) setting that config and file make together, and warnings. Raises as `resolve_conversion`."""
    o1 = config.o1
    return resolve_conversion(
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


def _teacher(
    config: PolishConfig, plan: ModelPlan, model: AnyModel, out: Path | None, progress: Progress
) -> tuple[ModelPlan | None, str | None]:
    """The plan of a separate teacher file, if one was given and can teach this model, and the hash of what it holds."""
    path = config.train.teacher
    if path is None:
        return None, None
    with open_model(path) as teacher:
        if out is not None:
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
