"""How long a polish will take, from the time of a few of its layers on this machine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import torch

from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.model.adamw import adamw_step, gradient_norm, new_moments
from cortiq_fcd.model.layer_parts import part_numbers, read_part
from cortiq_fcd.model.windows import FINAL_ROUNDS, QUICK_ROUNDS
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.dequantize import Unpacker
from cortiq_fcd.stages.miniature import seconds
from cortiq_fcd.stages.savings import Savings, visits
from cortiq_fcd.stages.works import Sizes, decode, miniatures, validate
from cortiq_fcd.stages.works import step as step_of

MOST_POSITIONS = 1024  # that are tried out: what has more windows is scaled up from some of them


@dataclass(frozen=True)
class Time:
    """Seconds, measured on this machine as busy as it is. `total` has every validation judged by the gate.

    Of the `windows` of a step `tried` were measured, and the others scaled up from them.
    """

    step: float
    validation: float
    gate: float
    before: float
    after: float
    total: float
    windows: int
    tried: int


def duration(sizes: Sizes, savings: Savings, model: CmfModel | None, device: torch.device) -> Time:
    """The time of a run, from the time of a few layers, and of reading one where layers are streamed."""
    train, c = sizes.train, sizes.conversion
    tried = windows_tried(train)
    part, whole = train.model_copy(update={"batch": tried}), train.batch / tried
    of_all = miniatures(sizes, device, blank=False).of_all
    step = whole * of_all(step_of(part, device), seconds) + _optimizer_seconds(sizes, device)
    step += _reading_seconds(sizes, savings, model, device)
    window_batch = whole * of_all(partial(validate, part), seconds)
    gate = (
        _decode_seconds(sizes, device, sizes.prompts, sizes.prompt_tokens, sizes.new_tokens) if sizes.prompts else 0.0
    )
    served = 0.0
    if c.seal < train.seq:
        served = whole * _decode_seconds(sizes, device, FINAL_ROUNDS * tried, c.seal, train.seq - c.seal)
    # The six rounds, and windows that nothing touched; see `evaluate`. After training the teacher's rows once more.
    teacher = (FINAL_ROUNDS + QUICK_ROUNDS) * window_batch
    before = 2 * gate + teacher + teacher + served
    after = teacher + served + FINAL_ROUNDS * window_batch
    validation = QUICK_ROUNDS * window_batch
    evaluations = 1 + (train.steps // train.eval_every if train.eval_every else 0)
    evaluations += not train.eval_every or train.steps % train.eval_every != 0
    total = before + train.steps * step + evaluations * (validation + gate) + after
    return Time(step, validation, gate, before, after, total, train.batch, tried)


def windows_tried(train: TrainConfig) -> int:
    """So many windows of a step are tried out."""
    return min(train.batch, max(1, MOST_POSITIONS // train.seq))


def what_is_tried(train: TrainConfig) -> str:
    """What is measured, in words."""
    tried = windows_tried(train)
    return "a step" if tried == train.batch else f"{tried} of the {train.batch} windows of a step"


def _reading_seconds(sizes: Sizes, savings: Savings, model: CmfModel | None, device: torch.device) -> float:
    """What streamed layers add to a step: they are read by one thread, which takes its share of the processors that the
    step computes on. `model` null: it is not written yet, and none are counted.
    """
    if not savings.streamed or model is None:
        return 0.0
    plan, teacher = sizes.plan, sizes.teacher_plan
    tried = max(savings.streamed, key=lambda part: part_numbers(plan, part))
    buffer, fill = torch.empty(part_numbers(plan, tried), device=device), Unpacker(model)
    best = math.inf
    for _ in range(3):  # the first one checks the numbers too, once in a run
        began = time.perf_counter()
        read_part(plan, fill, tried, buffer)
        best = min(best, time.perf_counter() - began)
    numbers = sum(
        part_numbers(of, part) * visits(plan, teacher, sizes.conversion, part, own=of is plan)
        for of, parts in ((plan, savings.streamed), (teacher, savings.teacher_streamed))
        for part in parts
        if of is not None
    )
    return best / buffer.numel() * numbers / torch.get_num_threads()


def _decode_seconds(sizes: Sizes, device: torch.device, batch: int, prompt: int, tokens: int) -> float:
    """A prompt pass and `tokens` more: the pass and one token are measured, and four more of them."""
    of_all = miniatures(sizes, device, blank=False).of_all
    first = of_all(decode(batch, prompt, prompt + tokens, 1), seconds)
    more = of_all(decode(batch, prompt, prompt + tokens, 5), seconds)
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
