"""The kernels side by side with what they are held against: python benchmarks/bench_kernels.py [--json FILE]

Calls that are compared take turns in one process, and medians are compared, so that a busy moment hits all of them.
Run it alone: on a machine that does other work the ratios mean little. Smaller is better in every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cortiq_fcd.kernels.causal_attention import (
    causal_attention_bwd,
    causal_attention_fwd,
    causal_attention_step,
)
from cortiq_fcd.kernels.ce_kl import COPIES, ce_kl, chunk_rows, nll_sum
from cortiq_fcd.kernels.delta_rule import delta_rule_bwd, delta_rule_fwd
from cortiq_fcd.kernels.landmark_inverse import landmark_inverse
from cortiq_fcd.kernels.o1_attention import Geometry, landmarks, o1_attention_bwd, o1_attention_fwd
from cortiq_fcd.kernels.o1_stream import seal_stream, stream_step
from cortiq_fcd.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from cortiq_fcd.kernels.rope import rope_bwd, rope_fwd, rotation
from cortiq_fcd.kernels.swiglu import swiglu_bwd, swiglu_fwd
from cortiq_fcd.stages.machine import keep_freed_memory
from tests.oracles import attention as oracle
from tests.oracles.delta_net import delta_rule as step_loop
from tests.oracles.memory import PeakMemory


def medians(*calls: Callable[[], object], rounds: int = 5, budget_s: float = 8.0) -> list[float]:
    """Median seconds of each call, taking turns; the first round warms up unless it used up the budget."""
    seconds: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    for _ in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        if time.perf_counter() - began > budget_s:
            break
    return [statistics.median(times[1:] or times) for times in seconds]


def row(name: str, value: float, unit: str, goal: float | None = None) -> dict[str, Any]:
    """One figure; `goal` is the most that it may be."""
    return {"name": name, "value": value, "unit": unit, "goal": goal}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attention_case(B: int, G: int, R: int, T: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return normal(B, G, R, T, D), normal(B, G, T, D), normal(B, G, T, D), normal(B, G, R, T, D)


def frozen_inverse(q: Tensor, k: Tensor, geometry: Geometry, m: int) -> Tensor:
    Qt, Kt = landmarks(q, k, geometry.seal, m)
    return landmark_inverse(Qt, Kt[:, :, None], geometry.scale)


def run_o1(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, geometry: Geometry, m: int) -> None:
    """Everything a layer pays: landmarks, M, forward, backward."""
    _, saved = o1_attention_fwd(q, k, v, frozen_inverse(q, k, geometry, m), geometry)
    o1_attention_bwd(dout, saved)


def run_causal(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> None:
    causal_attention_bwd(dout, causal_attention_fwd(q, k, v, scale)[1])


def run_sdpa(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """torch's fused attention on [B, H, T, D]; heads share keys through a view, which is what torch offers for GQA."""
    B, G, R, T, D = q.shape
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    queries = leaves[0].view(B, G * R, T, D)
    keys, values = (x[:, :, None].expand(B, G, R, T, D).reshape(B, G * R, T, D) for x in leaves[1:])
    out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    torch.autograd.grad(out, leaves, dout.view(B, G * R, T, D))


def run_plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, M: Tensor, geometry: Geometry) -> None:
    """The definition as T x T matrices in f64, sequence by sequence and kv head by kv head to bound its memory."""
    for b in range(q.shape[0]):
        for g in range(q.shape[1]):
            at = slice(b, b + 1), slice(g, g + 1)
            leaves = [x[at].double().requires_grad_() for x in (q, k, v)]
            joint = oracle.o1_attention(
                *leaves, M[at], seal=geometry.seal, window=geometry.window, sink=geometry.sink, scale=geometry.scale
            )
            torch.autograd.grad(joint.out, leaves, dout[at].double())


def growth_rows() -> Iterator[dict[str, Any]]:
    """Sealed after 256 tokens: the time of the rows behind the seal."""
    lengths, seconds = (512, 2048, 8192), []
    for T in lengths:
        q, k, v, dout = attention_case(1, 3, 3, T, 64)
        geometry = Geometry(256, 128, 4, 0.125)
        seconds += medians(partial(run_o1, q, k, v, dout, geometry, 32), rounds=11)
        yield row(f"O(1) fwd + bwd, 1 x 9 x {T} x 64, seal 256", 1e3 * seconds[-1], "ms")
    near, far = (1e6 * (seconds[i + 1] - seconds[i]) / (lengths[i + 1] - lengths[i]) for i in (0, 1))
    yield row("  slope from 512 to 2048, a row", near, "us")
    yield row("  slope from 2048 to 8192, a row", far, "us")
    yield row("  second slope / first (linear: 1)", far / near, "x", 1.25)


def attention_rows() -> Iterator[dict[str, Any]]:
    """Seal T / 2, window 128, sink 4, 32 landmarks; sdpa is torch's fused exact attention with its own backward."""
    for (B, G, R, T, D), of_plain, of_sdpa in (((2, 3, 3, 512, 64), 1 / 4, None), ((2, 8, 2, 2048, 128), 1 / 10, 1.3)):
        q, k, v, dout = attention_case(B, G, R, T, D)
        geometry = Geometry(T // 2, 128, 4, D**-0.5)
        M = frozen_inverse(q, k, geometry, 32)
        o1, exact, sdpa = medians(
            partial(run_o1, q, k, v, dout, geometry, 32),
            partial(run_causal, q, k, v, dout, geometry.scale),
            partial(run_sdpa, q, k, v, dout),
            rounds=11,
        )
        (plain,) = medians(partial(run_plain, q, k, v, dout, M, geometry), rounds=3, budget_s=2)
        size = f"{B} x {G * R} x {T} x {D}"
        yield row(f"O(1) fwd + bwd, {size} ({G} kv heads)", 1e3 * o1, "ms")
        yield row("  O(1) / plain f64 T x T", o1 / plain, "x", of_plain)
        yield row("  O(1) / sdpa", o1 / sdpa, "x", of_sdpa)
        yield row("  exact / sdpa", exact / sdpa, "x")


def run_chunked(inputs: tuple[Tensor, ...], dout: Tensor) -> None:
    delta_rule_bwd(dout, delta_rule_fwd(*inputs)[2])


def run_loop(inputs: tuple[Tensor, ...], dout: Tensor) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.autograd.grad(step_loop(*leaves)[0], leaves, dout)


def delta_rows() -> Iterator[dict[str, Any]]:
    """512 positions against the recurrence as one would write it, all heads at once; its backward is autograd's."""
    for B, G, R, D in ((2, 2, 2, 32), (2, 4, 2, 64), (1, 16, 2, 128)):
        q, k, v, dout = normal(B, G, 512, D), normal(B, G, 512, D), normal(B, G, R, 512, D), normal(B, G, R, 512, D)
        k = k / k.norm(dim=-1, keepdim=True)
        inputs = (q, k, v, -normal(B, G, R, 512).abs(), torch.sigmoid(normal(B, G, R, 512)))

        ours, theirs = medians(partial(run_chunked, inputs, dout), partial(run_loop, inputs, dout), rounds=7)
        yield row(f"delta rule fwd + bwd, {B} x {G * R} heads x {D}, T 512", 1e3 * ours, "ms")
        yield row("  chunked / step loop", ours / theirs, "x", 1 / 20)


def loss_rows() -> Iterator[dict[str, Any]]:
    """1024 rows x 49,152 x 576."""
    N, V, C = 1024, 49_152, 576
    student, teacher, head = normal(N, C), normal(N, C) / C**0.5, normal(V, C) / C**0.5
    targets = torch.arange(N) % V
    chunk = -(-N // -(-N // chunk_rows(V, 4, COPIES)))
    logits, dhidden = torch.empty(2 * chunk, V), torch.empty(N, C)

    def products() -> None:
        """Both logits and dhidden, chunk by chunk into standing buffers: nothing but the products."""
        for start in range(0, N, chunk):
            rows = slice(start, min(start + chunk, N))
            n = rows.stop - rows.start
            torch.mm(student[rows], head.T, out=logits[:n])
            torch.mm(teacher[rows], head.T, out=logits[n : 2 * n])
            torch.mm(logits[:n], head, out=dhidden[rows])

    ours, alone = medians(lambda: ce_kl(student, teacher, head, targets, 0.7), products, rounds=7)
    with PeakMemory() as memory:
        ce_kl(student, teacher, head, targets, 0.7)
    yield row(f"CE + KL and gradient, {N} rows x {V} x {C}", 1e3 * ours, "ms")
    yield row("  CE + KL / its three products alone", ours / alone, "x", 1.3)
    yield row("  peak memory beyond its inputs", memory.peak_bytes / 1e6, "MB", 200)
    (nll,) = medians(lambda: nll_sum(student, head, targets))
    yield row("  validation NLL of the same rows", 1e3 * nll, "ms")


def pointwise_rows() -> Iterator[dict[str, Any]]:
    """At the shapes of a step of SmolLM2-135M: 1024 rows, hidden 576, ffn 1536, 9 query heads of 64."""
    x, dx, weight = normal(1024, 576), normal(1024, 576), normal(576)
    gate, up, dy = normal(1024, 1536), normal(1024, 1536), normal(1024, 1536)
    q = normal(2, 512, 9, 64).transpose(1, 2)
    angles = rotation(512, [1e4 ** (-i / 32) for i in range(32)], like=q)
    norm = partial(rmsnorm_fwd, x, weight, 1e-5, plus_one=False)
    norm_saved = norm()[1]
    glu_saved = swiglu_fwd(gate, up)[1]
    for name, forward, backward in (
        (
            "rmsnorm 1024 x 576",
            lambda: rmsnorm_fwd(x, weight, 1e-5, plus_one=False),
            lambda: rmsnorm_bwd(dx, norm_saved),
        ),
        ("swiglu 1024 x 1536", lambda: swiglu_fwd(gate, up), lambda: swiglu_bwd(dy, glu_saved)),
        ("rope 2 x 9 x 512 x 64", lambda: rope_fwd(q, angles), lambda: rope_bwd(q, angles)),
    ):
        there, back = medians(forward, backward, rounds=31)
        yield row(f"{name}, fwd", 1e3 * there, "ms")
        yield row(f"{name}, bwd", 1e3 * back, "ms")


def decode_rows() -> Iterator[dict[str, Any]]:
    """One token of one layer, 3 sequences x 9 heads x 64 after 2000 tokens."""
    q, k, v, _ = attention_case(3, 3, 3, 2000, 64)
    state = seal_stream(q, k, v, landmark_count=32, window=128, sink=4, scale=0.125)
    step = [x.contiguous() for x in (q[..., -1, :], k[:, :, -1], v[:, :, -1])]
    served, exact = medians(
        lambda: [stream_step(state, *step) for _ in range(50)],
        lambda: [causal_attention_step(step[0], k, v, 0.125) for _ in range(50)],
    )
    yield row("decode step after 2000 tokens, 3 x 9 x 64", 1e3 * served / 50, "ms")
    yield row("  the same, exact", 1e3 * exact / 50, "ms")
    yield row("  state", state.nbytes / 1e6, "MB")


GROUPS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "growth": growth_rows,
    "attention": attention_rows,
    "delta": delta_rows,
    "loss": loss_rows,
    "pointwise": pointwise_rows,
    "decode": decode_rows,
}


def rows(groups: list[str] | None = None) -> list[dict[str, Any]]:
    """Every figure, or those of some groups: name, value, unit, goal (the most it may be, or null)."""
    keep_freed_memory()  # as every command does
    return [figure for name in groups or GROUPS for figure in GROUPS[name]()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS))
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = rows(options.only)
    print(f"torch {torch.__version__}, {options.threads} threads, f32; medians")
    for figure in figures:
        goal = figure["goal"]
        verdict = "" if goal is None else f"  at most {goal:g}: {'met' if figure['value'] <= goal else 'MISSED'}"
        print(f"{figure['name']:58}{figure['value']:10.3f} {figure['unit']:3}{verdict}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
