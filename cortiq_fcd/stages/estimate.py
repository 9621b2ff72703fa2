"""What a polish will need, before its first step: memory in every run, time and disk too for --dry-run."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.kernels.ce_kl import CHUNK_BYTES, COPIES, nll_sum
from cortiq_fcd.model.adamw import adamw_step, gradient_norm, new_moments
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.decode import Decoder
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.replica import Replica, hidden_states, loss_and_gradient
from cortiq_fcd.model.windows import FINAL_ROUNDS, QUICK_ROUNDS
from cortiq_fcd.stages.capacity import available_bytes, resident_bytes
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.miniature import Miniatures, peak_bytes, seconds

WORD_BYTES = 4
# Checkpoints on disk at once: two that are kept, and the one being written; each of masters, two moments, best state.
GENERATIONS, VECTORS = 3, 4
# What libraries take when they first work: product workspaces, thread stacks, decoders.
MANY_POSITIONS = 1 << 16  # of a step: beyond, trying one out takes long
WORKSPACE_BYTES = 24 << 20


@dataclass(frozen=True)
class Sizes:
    """What the cost of a polish depends on."""

    plan: ModelPlan
    teacher_plan: ModelPlan | None
    conversion: Conversion
    train: TrainConfig
    prompts: int  # of the gate; 0: it does not run
    prompt_tokens: int
    new_tokens: int

    @property
    def trained(self) -> int:
        """Weights that are trained."""
        names = [name for i in self.conversion.layers for name in self.plan.layers[i].trainable]
        return sum(_count(self.plan.shapes[name]) for name in names)


@dataclass(frozen=True)
class Memory:
    """Bytes. `peak` is the most that is in use at once: checkpoint copies and evaluations have their own moments."""

    process: int
    frozen: int
    teacher: int
    masters: int
    gradient: int
    moments: int
    best: int
    activations: int
    logits: int
    checkpoint_copy: int
    evaluation: int
    peak: int
    in_use: int
    available: int | None

    @property
    def fits(self) -> bool:
        """Whether what is still to be allocated is there."""
        return self.available is None or self.peak - self.in_use <= self.available


def memory(sizes: Sizes, device: torch.device) -> Memory:
    """The memory of a run: the device's if it is an accelerator, else the machine's."""
    weights = sizes.trained * WORD_BYTES
    frozen = sizes.plan.params * WORD_BYTES
    teacher = sizes.teacher_plan.params * WORD_BYTES if sizes.teacher_plan else 0
    in_use, available = _machine(device)  # before trying things out, which leaves some memory in use
    activations, evaluation = _work_bytes(sizes, device)
    process = in_use + WORKSPACE_BYTES
    train = sizes.train
    # With steps behind a checkpoint, its copy is still being written while they run.
    overlaps = 0 < train.eval_every < train.steps or train.steps > 25
    copy = 3 * weights
    training = 4 * weights + weights + (activations + copy if overlaps else max(activations, copy))
    judging = 2 * weights + evaluation
    return Memory(
        process=process,
        frozen=frozen,
        teacher=teacher,
        masters=weights,
        gradient=weights,
        moments=2 * weights,
        best=weights,
        activations=activations,
        logits=min(CHUNK_BYTES, train.batch * train.seq * sizes.plan.vocab_size * WORD_BYTES * COPIES),
        checkpoint_copy=copy,
        evaluation=evaluation,
        peak=process + frozen + teacher + max(training, judging),
        in_use=in_use,
        available=available,
    )


@dataclass(frozen=True)
class Disk:
    """Bytes. `checkpoints` is the most that OUT.partial takes at once; `free` is what the disk has where OUT goes."""

    out: int
    checkpoints: int
    free: int


def disk(sizes: Sizes, out: Path, out_bytes: int) -> Disk:
    """Where OUT goes. Raises OSError when the system doesn't tell."""
    free = shutil.disk_usage(out.absolute().parent).free
    return Disk(out_bytes, GENERATIONS * VECTORS * sizes.trained * WORD_BYTES, free)


@dataclass(frozen=True)
class Time:
    """Seconds, measured on this machine as busy as it is. `total` has every validation judged by the gate."""

    step: float
    validation: float
    gate: float
    before: float
    after: float
    total: float


def duration(sizes: Sizes, device: torch.device) -> Time:
    """The time of a run, from the time of a few layers."""
    train, c = sizes.train, sizes.conversion
    of_all = _miniatures(sizes, device, blank=False).of_all
    step = of_all(_step(train, device), seconds) + _optimizer_seconds(sizes, device)
    window_batch = of_all(partial(_validate, train), seconds)
    gate = (
        _decode_seconds(sizes, device, sizes.prompts, sizes.prompt_tokens, sizes.new_tokens) if sizes.prompts else 0.0
    )
    windows = FINAL_ROUNDS * train.batch
    served = _decode_seconds(sizes, device, windows, c.seal, train.seq - c.seal) if c.seal < train.seq else 0.0
    # The six rounds, and windows that nothing touched; see `evaluate`. After training the teacher's rows once more.
    teacher = (FINAL_ROUNDS + QUICK_ROUNDS) * window_batch
    before = 2 * gate + teacher + teacher + served
    after = teacher + served + FINAL_ROUNDS * window_batch
    validation = QUICK_ROUNDS * window_batch
    evaluations = 1 + (train.steps // train.eval_every if train.eval_every else 0)
    evaluations += not train.eval_every or train.steps % train.eval_every != 0
    total = before + train.steps * step + evaluations * (validation + gate) + after
    return Time(step, validation, gate, before, after, total)


def _validate(train: TrainConfig, replica: Replica) -> None:
    """One batch of windows, as `perplexity_at` runs them."""
    ids = _ids(train.batch, train.seq, replica.weights.embed.device)
    hidden = hidden_states(replica, ids, student=True, seal=replica.conversion.seal)
    nll_sum(hidden, replica.weights.head, ids.reshape(-1), softcap=replica.weights.plan.logit_softcap)


def _decode_seconds(sizes: Sizes, device: torch.device, batch: int, prompt: int, tokens: int) -> float:
    """A prompt pass and `tokens` more: the pass and one token are measured, and four more of them."""
    of_all = _miniatures(sizes, device, blank=False).of_all
    first = of_all(_decode(batch, prompt, prompt + tokens, 1), seconds)
    more = of_all(_decode(batch, prompt, prompt + tokens, 5), seconds)
    return first + max(0.0, more - first) / 4 * (tokens - 1)


def _optimizer_seconds(sizes: Sizes, device: torch.device) -> float:
    """Clip and AdamW over all trained weights, from a part of them that no cache holds."""
    part = min(sizes.trained, 1 << 24)
    weights = torch.zeros(part, device=device)
    gradient, state = torch.ones_like(weights), new_moments(weights)
    best = math.inf
    for _ in range(2):
        began = time.perf_counter()
        adamw_step(weights, gradient, state, 1e-6, gradient_norm(gradient))
        best = min(best, time.perf_counter() - began)
    return best * sizes.trained / part


@dataclass(frozen=True)
class Forecast:
    """What --dry-run tells. `fits` is empty, or says what would fit where the run does not."""

    layers: list[int]
    trainable_params: int
    resumes_after_step: int | None
    memory: Memory
    disk: Disk
    time: Time
    fits: str
    warnings: list[str]


def check_memory(sizes: Sizes, device: torch.device, processes: int = 1) -> None:
    """ResourceError (exit 6) if the run needs more memory than there is, with what would fit. `processes` of it begin
    on this machine at once, and each counts on its part of what is there.
    """
    check_least(sizes, device)
    needed = memory(sizes, device)
    if device.type == "cpu" and needed.available is not None:
        needed = replace(needed, available=needed.available // processes)
    if needed.fits:
        return
    where = "the machine or its cgroup" if device.type == "cpu" else str(device)
    raise ResourceError(
        f"this polish needs about {needed.peak:,} bytes of memory, {needed.in_use:,} of them in use already, and only "
        f"{needed.available:,} more are available on {where}",
        hint=what_fits(sizes, device),
    )


def check_least(sizes: Sizes, device: torch.device) -> None:
    """Refuse what is hopeless by arithmetic alone where trying it out, as the estimate does, would take minutes."""
    if sizes.train.batch * sizes.train.seq < MANY_POSITIONS:
        return
    _, available = _machine(device)
    widest = max(layer.ffn_size for layer in sizes.plan.layers)
    # The least a step holds: the input of every trained layer, and one layer's feed-forward.
    columns = sizes.plan.hidden_size * len(sizes.conversion.layers) + widest
    least = sizes.train.batch * sizes.train.seq * columns * WORD_BYTES
    if available is not None and least > available:
        raise ResourceError(
            f"a step of --batch {sizes.train.batch} and --seq {sizes.train.seq} needs more than {least:,} bytes of"
            f" memory, and only {available:,} are available",
            hint="try a much smaller --batch or --seq",
        )


def what_fits(sizes: Sizes, device: torch.device) -> str:
    """Smaller batches and fewer layers that would fit, alone or together."""
    layers, batch = sizes.conversion.layers, sizes.train.batch
    batches = [batch >> k for k in range(1, batch.bit_length())]
    depths = [len(layers) >> k for k in range(1, len(layers).bit_length())]
    tries: list[tuple[str, Sizes]] = []
    for smaller in batches:
        tries.append((f"--batch {smaller}", _smaller(sizes, smaller, len(layers))))
    for depth in depths:
        tries.append((f"--o1 {_deepest(layers, depth)}", _smaller(sizes, batch, depth)))
    for depth in depths:
        tries.append((f"--o1 {_deepest(layers, depth)} --batch 1", _smaller(sizes, 1, depth)))
    fitting = [flags for flags, other in tries if memory(other, device).fits]
    alone = [
        next((f for f in fitting if f.startswith(kind) and f.count("--") == 1), None) for kind in ("--batch", "--o1")
    ]
    found = [flags for flags in alone if flags] or fitting[:1]
    if not found:
        return "not even one layer with --batch 1 would fit; try a smaller --seq, or a machine with more memory"
    return f"this would fit: {' or '.join(found)}"


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


def _work_bytes(sizes: Sizes, device: torch.device) -> tuple[int, int]:
    """Most bytes alive at once, beside weights and optimizer: in a step, and in evaluations."""
    train, c = sizes.train, sizes.conversion
    of_all = _miniatures(sizes, device, blank=True).of_all
    step = of_all(_step(train, device), peak_bytes)
    # What decodes: the evaluation's windows all at once, and the gate's prompts. The one with more rows needs more.
    windows = FINAL_ROUNDS * train.batch if c.seal < train.seq else 0
    decodes = max((windows, c.seal), (sizes.prompts, sizes.prompt_tokens), key=lambda pair: pair[0] * pair[1])
    judging = of_all(_decode(*decodes, decodes[1] + sizes.new_tokens, 1), peak_bytes) if decodes[0] else 0.0
    rows = 2 * windows * train.seq * sizes.plan.hidden_size * WORD_BYTES
    return int(step), int(judging) + rows


def _miniatures(sizes: Sizes, device: torch.device, *, blank: bool) -> Miniatures:
    return Miniatures(sizes.plan, sizes.teacher_plan, sizes.conversion, device, blank)


def _ids(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(batch, tokens, dtype=torch.int64, device=device)


def _step(train: TrainConfig, device: torch.device) -> Callable[[Replica], object]:
    ids = _ids(train.batch, train.seq, device)
    return lambda replica: loss_and_gradient(replica, ids, ids, train.kl)


def _decode(batch: int, prompt: int, tokens: int, steps: int) -> Callable[[Replica], object]:
    """A prompt pass, and so many more tokens."""

    def work(replica: Replica) -> None:
        device = replica.weights.embed.device
        decoder = Decoder(replica, student=True, served=True, capacity=tokens)
        decoder.prompt(_ids(batch, prompt, device))
        for _ in range(steps):
            decoder.step(_ids(batch, 1, device)[:, 0])

    return work


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
