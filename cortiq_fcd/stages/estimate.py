"""What a polish will need, before its first step: memory in every run, time and disk too for --dry-run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.kernels.ce_kl import CHUNK_BYTES, COPIES
from cortiq_fcd.model.gradient_sum import BUCKET_ELEMENTS
from cortiq_fcd.model.layer_parts import Part
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.stored_moments import BUFFER_BYTES
from cortiq_fcd.model.windows import FINAL_ROUNDS
from cortiq_fcd.stages.capacity import available_bytes, peak_resident_bytes, resident_bytes, trim
from cortiq_fcd.stages.durations import Time
from cortiq_fcd.stages.miniature import peak_bytes
from cortiq_fcd.stages.savings import (
    Savings,
    all_parts,
    buffer_bytes,
    divided_bytes,
    ladder,
    no_savings,
    streamed_bytes,
    unused_parts,
)
from cortiq_fcd.stages.sharding import Sharding
from cortiq_fcd.stages.works import Sizes, decode, miniatures, step, validate

WORD_BYTES = 4
# Checkpoints on disk at once: two that are kept, and the one being written; each of masters, two moments, best state.
GENERATIONS, VECTORS = 3, 4
MANY_POSITIONS = 1 << 16  # of a step: beyond, trying one out takes long
# Buffers of files that are read and written, and the like.
WORKSPACE_BYTES = 16 << 20
# Of a budget, left free for what the estimate can't see: memory that was freed and can't be used again.
MARGIN = 0.04
STEP_BYTES = 10**7
HELD = 0.9  # share of the room that evaluations may fill: what they hold lies between what they work on


@dataclass(frozen=True)
class Memory:
    """Bytes. `peak` is the most that is in use at once: checkpoint copies and evaluations have their own moments.

    `buffers` are those that streamed weights are read into; `room` is what a budget leaves evaluations to hold some.
    """

    process: int
    frozen: int
    teacher: int
    buffers: int
    masters: int
    gradient: int
    moments: int
    best: int
    activations: int
    logits: int
    checkpoint_copy: int
    evaluation: int
    transfers: int
    peak: int
    in_use: int
    available: int | None
    ahead: int = 0  # what must be there from now on: `peak` on a slow disk, without what was in use and is free again
    budget: int | None = None
    room: int = 0

    @property
    def always(self) -> int:
        """What is there in steps and in evaluations alike."""
        weights = self.masters + self.gradient + self.moments + self.best
        return self.process + self.frozen + self.teacher + self.buffers + self.transfers + weights

    @property
    def fits(self) -> bool:
        """Whether what is still to be allocated is there."""
        return self.available is None or self.ahead - self.in_use <= self.available


@dataclass(frozen=True)
class Costs:
    """Bytes, as tried out: what the process has in use, had at most, and can still have; the most that is alive in a
    step on the deepest trained layer alone, what every other layer adds, and the most of an evaluation.
    """

    in_use: int
    peak: int
    available: int | None
    alone: float
    each: Mapping[int, float]
    evaluation: int


def measure(sizes: Sizes, device: torch.device) -> Costs:
    """Try out a step and evaluations on miniatures. What libraries keep after that is part of what is in use."""
    peak = (peak_resident_bytes() or 0) if device.type == "cpu" else 0
    alone, each = miniatures(sizes, device, blank=True).of_each(step(sizes.train, device), peak_bytes)
    evaluation = _evaluation_bytes(sizes, device)
    trim()
    in_use, available = _machine(device)
    if device.type == "cpu" and available is not None:
        available //= sizes.sharding.local_world  # each process on this machine counts on its part
    return Costs(in_use, peak, available, alone, each, evaluation)


def add_up(sizes: Sizes, costs: Costs, savings: Savings) -> Memory:
    """The memory of a run: the device's if it is an accelerator, else the machine's."""
    plan, train = sizes.plan, sizes.train
    weights, sharding = sizes.trained * WORD_BYTES, sizes.sharding
    unused = unused_parts(sizes.conversion, sizes.teacher_plan)
    frozen, buffers = _frozen(plan, savings.streamed, unused, sharding)
    teacher = 0
    if sizes.teacher_plan is not None:
        teacher, more = _frozen(sizes.teacher_plan, savings.teacher_streamed, frozenset(), sharding)
        buffers += more
    if buffers:
        buffers += sizes.unpack_bytes
    inputs = plan.num_loops * train.batch * train.seq * plan.hidden_size * WORD_BYTES
    activations = int(
        costs.alone + sum(min(inputs, cost) if i in savings.recomputed else cost for i, cost in costs.each.items())
    )
    # Divided masters are not where the gradient is: that is written over copies of them, unless layers run twice.
    own = -(-weights // sharding.world) if sharding.optimizer else weights
    gradient = 2 * weights if sharding.optimizer and plan.num_loops > 1 else weights
    copy, best = (0, 0) if savings.on_disk else (0 if sharding.optimizer else 3 * weights, own)
    # With steps behind a checkpoint, its copy is being written while they run. It is freed vector by vector, while
    # activations come to be; only a disk too slow for that keeps it whole beside them.
    overlaps = 0 < train.eval_every < train.steps or train.steps > 25
    at_work, at_worst = max(activations, copy), activations + copy if overlaps else max(activations, copy)
    moments = 2 * own
    needed = Memory(
        process=costs.in_use + WORKSPACE_BYTES,
        frozen=frozen,
        teacher=teacher,
        buffers=buffers,
        masters=own,
        gradient=gradient,
        moments=min(moments, BUFFER_BYTES) if savings.moments_on_disk else moments,
        best=best + (weights if train.ema else 0),  # and the average, which may become the best
        activations=activations,
        logits=min(CHUNK_BYTES, train.batch * train.seq * sizes.plan.vocab_size * WORD_BYTES * COPIES),
        checkpoint_copy=copy,
        evaluation=costs.evaluation,
        transfers=min(weights, BUCKET_ELEMENTS * WORD_BYTES) if sharding.world > 1 else 0,
        peak=0,
        in_use=costs.in_use,
        available=costs.available,
    )
    peak = max(needed.always + max(at_work, costs.evaluation), costs.peak)
    return replace(needed, peak=peak, ahead=needed.always + max(at_worst, costs.evaluation))


def _frozen(plan: ModelPlan, streamed: frozenset[Part], unused: frozenset[Part], sharding: Sharding) -> tuple[int, int]:
    """Memory of a model's weights on the rank with the most, and of the buffers for what is not there."""
    frozen = plan.params * WORD_BYTES - streamed_bytes(plan, streamed)
    if not sharding.model:
        return frozen, buffer_bytes(plan, streamed - unused)
    divided = all_parts(plan) - streamed
    own = divided_bytes(plan, divided, sharding.world)
    return frozen - streamed_bytes(plan, divided) + own, buffer_bytes(plan, divided)


def memory(sizes: Sizes, device: torch.device) -> Memory:
    """The memory of a run without a budget."""
    return add_up(sizes, measure(sizes, device), no_savings(sizes.conversion, sizes.teacher_plan))


@dataclass(frozen=True)
class Disk:
    """Bytes. `checkpoints` is the most that OUT.partial takes at once; `free` is what the disk has where OUT goes."""

    out: int
    checkpoints: int
    free: int


def disk(sizes: Sizes, savings: Savings, out: Path, out_bytes: int) -> Disk:
    """Where OUT goes. Raises OSError when the system doesn't tell."""
    free = shutil.disk_usage(out.absolute().parent).free
    vectors = GENERATIONS * VECTORS + 2 * savings.on_disk + 2 * savings.moments_on_disk  # a new best beside the old one
    return Disk(out_bytes, vectors * sizes.trained * WORD_BYTES, free)


@dataclass(frozen=True)
class Forecast:
    """What --dry-run tells. `savings` says how memory is saved; `fits` is empty, or says what would fit instead."""

    layers: list[int]
    trainable_params: int
    resumes_after_step: int | None
    memory: Memory
    savings: str
    disk: Disk
    time: Time
    fits: str
    warnings: list[str]


def settle(sizes: Sizes, device: torch.device, budget: int | None) -> tuple[Memory, Savings]:
    """How the run will live within the budget, and the memory it needs. Null: within what there is, saving only if it
    must; what it needs may still not be there. Several processes can't save.

    ResourceError (exit 6) if no savings bring it within the budget, with the smallest that would do.
    """
    check_least(sizes, device)
    costs = measure(sizes, device)
    if budget is None:
        return _within_the_machine(sizes, costs, may_save=sizes.sharding.world == 1)
    for needed, savings in _ladder(sizes, costs):
        if needed.peak <= (usable := _usable(budget)):
            return replace(needed, budget=budget, room=_room(needed, usable)), savings
    smaller = " or a smaller --batch" if sizes.train.batch > 1 else ""
    raise ResourceError(
        f"--memory-budget {_size(budget)} is too small for this polish",
        hint=f"the smallest that works is {_size(_least_budget(sizes, costs))};"
        f" fewer layers (--o1){smaller} would need less",
    )


def _within_the_machine(sizes: Sizes, costs: Costs, *, may_save: bool) -> tuple[Memory, Savings]:
    """No savings if that fits, else the first that do, else those that need the least."""
    savings = no_savings(sizes.conversion, sizes.teacher_plan)
    needed = add_up(sizes, costs, savings)
    if needed.fits or costs.available is None or not may_save:
        return needed, savings
    usable = _usable(costs.in_use + costs.available)
    rungs = list(_ladder(sizes, costs))
    for needed, savings in rungs:
        if needed.ahead <= usable:
            return replace(needed, room=_room(needed, usable)), savings
    return min(rungs, key=lambda rung: rung[0].ahead)


def _room(needed: Memory, usable: int) -> int:
    return max(0, int(HELD * (usable - needed.always - needed.evaluation)))


def _ladder(sizes: Sizes, costs: Costs) -> Iterator[tuple[Memory, Savings]]:
    for savings in ladder(sizes.plan, sizes.teacher_plan, sizes.conversion):
        yield add_up(sizes, costs, savings), savings


def _least_budget(sizes: Sizes, costs: Costs) -> int:
    """The smallest budget that works, in steps of 10 MB."""
    least = min(needed.peak for needed, _ in _ladder(sizes, costs))
    return -(-int(least / (1 - MARGIN) + 1) // STEP_BYTES) * STEP_BYTES


def _usable(budget: int) -> int:
    return budget - int(MARGIN * budget)


def _size(nbytes: int) -> str:
    """As --memory-budget takes it: 2.4G, 810M."""
    if nbytes >= 10**9:
        return f"{nbytes / 10**9:.2f}".rstrip("0").rstrip(".") + "G"
    return f"{nbytes / 10**6:.6f}".rstrip("0").rstrip(".") + "M"


def check_fits(sizes: Sizes, device: torch.device, needed: Memory) -> None:
    """ResourceError (exit 6) if the run needs more memory than there is, with what would fit."""
    if needed.fits:
        return
    least = ", even with layers streamed from the file" if needed.buffers else ""
    where = "the machine or its cgroup" if device.type == "cpu" else str(device)
    raise ResourceError(
        f"this polish needs about {needed.ahead:,} bytes of memory{least}, {needed.in_use:,} of them in use already,"
        f" and only {needed.available:,} more are available on {where}",
        hint=what_fits(sizes, device),
    )


def check_least(sizes: Sizes, device: torch.device) -> None:
    """Refuse what is hopeless by arithmetic alone where trying it out, as the estimate does, would take minutes."""
    if sizes.train.batch * sizes.train.seq < MANY_POSITIONS:
        return
    _, available = _machine(device)
    if device.type == "cpu" and available is not None:
        available //= sizes.sharding.local_world
    widest = max(layer.ffn_size for layer in sizes.plan.layers)
    # The least a step holds: the input of every trained layer, and one layer's feed-forward.
    columns = sizes.plan.hidden_size * len(sizes.conversion.layers) + widest
    least = sizes.train.batch * sizes.train.seq * columns * WORD_BYTES
    if available is not None and least > available:
        raise ResourceError(
            f"a step of --batch {sizes.batch} and --seq {sizes.train.seq} needs more than {least:,} bytes of"
            f" memory, and only {available:,} are available",
            hint="try a much smaller --batch or --seq",
        )


def what_fits(sizes: Sizes, device: torch.device) -> str:
    """Dividing more, smaller batches and fewer layers that would fit, alone or together."""
    divided = _fitting_division(sizes, device) if sizes.sharding.world > 1 else None
    layers, batch = sizes.conversion.layers, sizes.train.batch
    batches = [batch >> k for k in range(1, batch.bit_length())]
    depths = [len(layers) >> k for k in range(1, len(layers).bit_length())]
    tries: list[tuple[str, Sizes]] = []
    for smaller in batches:
        tries.append((f"--batch {smaller * sizes.sharding.world}", _smaller(sizes, smaller, len(layers))))
    for depth in depths:
        tries.append((f"--o1 {_deepest(layers, depth)}", _smaller(sizes, batch, depth)))
    for depth in depths:
        tries.append((f"--o1 {_deepest(layers, depth)} --batch {sizes.sharding.world}", _smaller(sizes, 1, depth)))
    fitting = [flags for flags, other in tries if _fits(other, device)]
    alone = [
        next((f for f in fitting if f.startswith(kind) and f.count("--") == 1), None) for kind in ("--batch", "--o1")
    ]
    found = [flags for flags in (divided, *alone) if flags] or fitting[:1]
    if not found:
        least = f"not even one layer with --batch {sizes.sharding.world} would fit"
        return f"{least}; try a smaller --seq, or a machine with more memory"
    return f"this would fit: {' or '.join(found)}"


def _fits(sizes: Sizes, device: torch.device) -> bool:
    """Whether such a run would fit, with savings if it must."""
    needed, _ = _within_the_machine(sizes, measure(sizes, device), may_save=sizes.sharding.world == 1)
    return needed.fits


def _fitting_division(sizes: Sizes, device: torch.device) -> str | None:
    """The flags that divide enough over the processes."""
    now = sizes.sharding
    for optimizer, model in ((True, now.model), (now.optimizer, True), (True, True)):
        more = replace(sizes, sharding=replace(now, optimizer=optimizer, model=model))
        if more != sizes and _fits(more, device):
            return " ".join(["--shard-optimizer"] * optimizer + ["--shard-model"] * model)
    return None


def _smaller(sizes: Sizes, batch: int, depth: int) -> Sizes:
    conversion = replace(sizes.conversion, layers=sizes.conversion.layers[-depth:])
    return replace(sizes, train=sizes.train.model_copy(update={"batch": batch}), conversion=conversion)


def _deepest(layers: tuple[int, ...], depth: int) -> str:
    return ",".join(map(str, layers[-depth:]))


def _machine(device: torch.device) -> tuple[int, int | None]:
    """Bytes in use by this process, and bytes that it can still have."""
    if device.type != "cuda":
        return resident_bytes(), available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device), int(free)


def _evaluation_bytes(sizes: Sizes, device: torch.device) -> int:
    """Most bytes alive at once in evaluations, beside weights and optimizer."""
    train, seal = sizes.train, sizes.conversion.seal
    small = miniatures(sizes, device, blank=True)
    validation = small.of_one(partial(validate, train), peak_bytes)
    windows = FINAL_ROUNDS * train.batch if seal < train.seq else 0
    # All windows go through a layer before the next one is visited; the gate's prompts go through all layers together.
    served = small.of_one(decode(windows, seal, train.seq, 1), peak_bytes) if windows else 0.0
    gate = 0.0
    if sizes.prompts:
        longest = sizes.prompt_tokens + sizes.new_tokens
        gate = small.of_all(decode(sizes.prompts, sizes.prompt_tokens, longest, 1), peak_bytes)
    rows = 2 * FINAL_ROUNDS * train.batch * train.seq * sizes.plan.hidden_size * WORD_BYTES
    return int(max(validation + rows, served + rows, gate))
