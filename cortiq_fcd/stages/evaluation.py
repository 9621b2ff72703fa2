"""`eval`: perplexity of a text through exact attention and through the served O(1) kernel, on the same tokens.

Both are decoded one token at a time after an exact pass over the prompt part of each window, as a runtime would. The
windows are those of a polish's final figures, so the numbers are the report's `ppl.served`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cortiq_fcd.errors import ConfigError, CorpusError
from cortiq_fcd.events import Listener, ignore
from cortiq_fcd.io.corpus import Text, load_text
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.kernels.ce_kl import kl_sum, nll_sum
from cortiq_fcd.model.conversion import auto_count
from cortiq_fcd.model.decode import Decoder
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.windows import FINAL_ROUNDS, free_offsets, validation_offsets, windows
from cortiq_fcd.stages import choose, sweep
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.machine import choose_device, memory_info, tool_info
from cortiq_fcd.stages.progress import Progress
from cortiq_fcd.stages.reading import Reading, now, open_reading, source_info, text_info
from cortiq_fcd.stages.readings import EvalReport, Side, WindowsInfo


@dataclass
class _Sums:
    """What adds up over the windows of one kind of attention: nats, and seconds."""

    nll: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0

    def side(self, positions: int) -> Side:
        mean = self.nll / positions
        ppl = math.exp(mean) if mean < 700 else math.inf
        return Side(
            ppl=ppl if math.isfinite(ppl) else None,
            seconds=self.prompt_s + self.decode_s,
            tokens_per_s=positions / self.decode_s,
        )


def run(
    file: Path,
    config: PolishConfig,
    text: Path | None,
    count: int | None,
    listener: Listener = ignore,
    *,
    with_sweep: bool = False,
) -> EvalReport:
    """Measure `file` on a text (null: the built-in one) in `count` windows (null: as many as a polish's final figures).

    `with_sweep`: other settings of the kernel, too.

    Raises CortiqError (see `cortiq_fcd.errors`).
    """
    progress = Progress(listener)
    device = choose_device(config.compute)
    train = config.train
    count_of_layers = auto_count(config.o1.layers)
    o1 = config.o1 if count_of_layers is None else config.o1.model_copy(update={"layers": "all"})
    with open_model(file) as model:
        reading = open_reading(model, o1, train.seq, o1.prefill, progress)
        if reading.conversion.seal == train.seq:
            raise ConfigError("--prefill equals --seq: no position is left to predict", hint="give a smaller --prefill")
        read = load_text(text=text, max_bytes=config.corpus.max_val_bytes, model=model)
        progress.warn(*read.notes)
        count = FINAL_ROUNDS * train.batch if count is None else _capped(read, train.seq, count, progress)
        offsets = _offsets(read, train.seq, count, progress)
        network, costs = reading.load(device, progress), None
        if count_of_layers is not None:
            choice = choose.run(count_of_layers, network, read.ids, _beside(read, offsets, train.seq), train, progress)
            conversion = replace(reading.conversion, layers=choice.layers, spec=choice.layers)
            reading, network = replace(reading, conversion=conversion), replace(network, conversion=conversion)
            costs = choice.costs()
        noun = "window" if len(offsets) == 1 else "windows"
        with progress.stage("evaluate", f"{len(offsets)} {noun} of {train.seq} tokens"):
            exact, served, kl = _measure(network, reading, read, offsets, train.seq, FINAL_ROUNDS * train.batch)
        swept = None
        if with_sweep and served is not None:
            with progress.stage("evaluate", "other settings of the kernel"):
                swept = sweep.run(network, read.ids, offsets, train.seq, train.batch)
    seal = reading.conversion.seal
    positions = len(offsets) * (train.seq - seal)
    exact_side, served_side = exact.side(positions), served.side(positions) if served else None
    kl_mean = kl / positions
    return EvalReport(
        tool=tool_info(device),
        created=now(),
        file=source_info(model, reading.plan),
        o1=reading.o1(seal, costs),
        text=text_info(read),
        windows=WindowsInfo(count=len(offsets), seq=train.seq, prefill=seal, positions=positions),
        exact=exact_side,
        served=served_side,
        ratio=_ratio(exact_side, served_side),
        kl=kl_mean if served and math.isfinite(kl_mean) else None,
        reason=reading.exact_only or _not_finite(exact_side, served_side),
        sweep=swept,
        memory=memory_info(device),
        warnings=progress.notes,
    )


def _capped(text: Text, seq: int, count: int, progress: Progress) -> int:
    """What was asked for, or as many different windows as the text holds."""
    distinct = max(1, len(text.ids) - seq)
    if count <= distinct:
        return count
    progress.warn(f"the text holds {distinct:,} different windows of {seq} tokens: these are measured, not {count:,}")
    return distinct


def _offsets(text: Text, seq: int, count: int, progress: Progress) -> list[int]:
    """Where the windows begin. CorpusError for a text without room for one and the token behind it."""
    tokens = len(text.ids)
    if tokens < seq + 1:
        raise CorpusError(
            f"the text is too short for windows of {seq} tokens: expected at least {seq + 1} tokens, got {tokens} "
            f"({text.source})",
            hint="give a longer text or a smaller --seq",
        )
    if tokens - seq < count:
        progress.warn(f"the text holds only {tokens - seq} distinct windows of {seq} tokens, {count} are measured")
    return validation_offsets(tokens, seq, count)


def _beside(text: Text, offsets: list[int], seq: int) -> list[int]:
    """Windows to choose layers by, none of them measured. CorpusError for a text without room for one."""
    free = free_offsets(len(text.ids), [(offset, offset + seq + 1) for offset in offsets], seq + 1)
    if not free:
        raise CorpusError(
            f"the text has no window of {seq} tokens beside the {len(offsets)} that are measured, to choose layers by",
            hint="give a longer text or fewer --windows",
        )
    step = max(1, len(free) // choose.CALIBRATION_WINDOWS)
    return free[::step][: choose.CALIBRATION_WINDOWS]


def _measure(
    network: Replica, reading: Reading, text: Text, offsets: list[int], seq: int, at_once: int
) -> tuple[_Sums, _Sums | None, float]:
    """Sums of exact and of served attention (null: there is none), and of their KL in nats. `at_once`: windows that
    move in step.
    """
    exact, served, kl = _Sums(), None if reading.exact_only else _Sums(), 0.0
    for start in range(0, len(offsets), at_once):
        ids, targets = windows(text.ids, offsets[start : start + at_once], seq, network.weights.embed.device)
        exact_rows = _decoded(network, ids, targets, exact, served=False)
        if served is not None:
            kl += _kl(network, _decoded(network, ids, targets, served, served=True), exact_rows)
    return exact, served, kl


def _decoded(network: Replica, ids: Tensor, targets: Tensor, sums: _Sums, *, served: bool) -> Tensor:
    """What the head multiplies at the positions from the seal on, [B * (T - seal), C]; NLL and time go into `sums`."""
    seal, weights = network.conversion.seal, network.weights
    decoder = Decoder(network, student=True, served=served, capacity=ids.shape[1])
    began = _clock(ids)
    decoder.prompt(ids[:, :seal])
    prompted = _clock(ids)
    rows = torch.stack([decoder.step(ids[:, t]) for t in range(seal, ids.shape[1])], 1).flatten(0, 1)
    targets = targets[:, seal:].reshape(-1)
    sums.nll += nll_sum(rows, weights.head, targets, softcap=weights.plan.logit_softcap)
    sums.prompt_s += prompted - began
    sums.decode_s += _clock(ids) - prompted
    return rows


def _kl(network: Replica, served: Tensor, exact: Tensor) -> float:
    """Sum of KL(exact || served) over rows, nats."""
    cap = network.weights.plan.logit_softcap
    return kl_sum(served, exact, network.weights.head, softcap=cap, teacher_softcap=cap)


def _clock(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def _ratio(exact: Side, served: Side | None) -> float | None:
    if served is None or served.ppl is None or exact.ppl is None:
        return None
    return served.ppl / exact.ppl


def _not_finite(exact: Side, served: Side | None) -> str:
    return "a perplexity was not finite" if exact.ppl is None or (served is not None and served.ppl is None) else ""
