"""Timing tables of the kernels: python benchmarks/bench_kernels.py [--threads 2] [--cpu-time] [--only NAME ...]

Every figure is the best of a few runs, in milliseconds; the calls of one row take turns in one process. On a machine
that does other work wall time means little: --cpu-time counts the CPU seconds of a single thread instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
from cortiq_fcd.kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from cortiq_fcd.kernels.o1_attention import Geometry, landmarks, o1_attention_bwd, o1_attention_fwd
from cortiq_fcd.kernels.o1_stream import seal_stream, stream_step
from cortiq_fcd.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from cortiq_fcd.kernels.rope import rope_bwd, rope_fwd, rotation
from cortiq_fcd.kernels.segment_means import segment_means_bwd, segment_means_fwd
from cortiq_fcd.kernels.swiglu import swiglu_bwd, swiglu_fwd
from tests.oracles import attention as oracle
from tests.oracles.delta_net import delta_rule as step_loop
from tests.oracles.memory import PeakMemory

clock = time.perf_counter


def best_ms(*calls: Callable[[], object], rounds: int = 5, budget_s: float = 20.0) -> list[float]:
    """Best time of each call, taking turns so that a busy moment hits all of them; slow calls get fewer rounds."""
    best = [float("inf")] * len(calls)
    started = time.perf_counter()
    for done in range(rounds):
        for i, call in enumerate(calls):
            begin = clock()
            call()
            best[i] = min(best[i], 1e3 * (clock() - begin))
        if done and time.perf_counter() - started > budget_s:
            break
    return best


def table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for first, *rest in [header, *rows]:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        print("  " + "  ".join(cells))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def bench_pointwise() -> None:
    """1024 rows of a model of hidden size 576, ffn 1536, heads 9 on 3 of 64."""
    N, C, F = 1024, 576, 1536
    x, dx, weight = normal(N, C), normal(N, C), normal(C)
    gate, up, dy = normal(N, F), normal(N, F), normal(N, F)
    W, wide = normal(F, C), normal(N, F)
    q = normal(2, 512, 9, 64).transpose(1, 2)
    angles = rotation(512, [1e4 ** (-i / 32) for i in range(32)], like=q)
    norm_saved = rmsnorm_fwd(x, weight, 1e-5, plus_one=False)[1]
    glu_saved = swiglu_fwd(gate, up)[1]
    rows = []
    for name, forward, backward in (
        (
            "linear 1024 x 576 -> 1536 (bwd: dx and dW)",
            lambda: linear_fwd(x, W),
            lambda: (linear_bwd_input(wide, W), linear_bwd_weight(wide, x)),
        ),
        (
            "rmsnorm 1024 x 576",
            lambda: rmsnorm_fwd(x, weight, 1e-5, plus_one=False),
            lambda: rmsnorm_bwd(dx, norm_saved),
        ),
        ("swiglu 1024 x 1536", lambda: swiglu_fwd(gate, up), lambda: swiglu_bwd(dy, glu_saved)),
        ("rope 2 x 9 x 512 x 64", lambda: rope_fwd(q, angles), lambda: rope_bwd(q, angles)),
        (
            "segment_means 2 x 9 x 256 x 64 -> 32",
            lambda: segment_means_fwd(q, 256, 32),
            lambda: segment_means_bwd(q[..., :32, :], 256),
        ),
    ):
        a, b = best_ms(forward, backward, rounds=20)
        rows.append((name, f"{a:.3f}", f"{b:.3f}"))
    Qt, Kt = normal(2, 3, 3, 32, 64), normal(2, 3, 1, 32, 64)
    (a,) = best_ms(lambda: landmark_inverse(Qt, Kt, 0.125), rounds=20)
    rows.append(("landmark_inverse 2 x 9 heads, m 32 (f64)", f"{a:.3f}", "-"))
    table("Single ops", ("op", "forward", "backward"), rows)


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


def slope_ms(T: int) -> list[float]:
    q, k, v, dout = attention_case(1, 3, 3, T, 64)
    geometry = Geometry(256, 128, 4, 0.125)
    return best_ms(
        lambda: run_o1(q, k, v, dout, geometry, 32),
        lambda: run_causal(q, k, v, dout, geometry.scale),
        rounds=3 if T > 4000 else 7,
    )


def bench_o1_slope() -> None:
    lengths = (512, 2048, 8192)
    times = {T: slope_ms(T) for T in lengths}
    table(
        "O(1) attention forward + backward, 1 x 9 x T x 64 (3 kv heads), seal 256, window 128, sink 4, m 32",
        ("T", "O(1)", "us a row after the seal", "exact (ours)", "exact / O(1)"),
        [
            (str(T), f"{o1:.1f}", f"{1e3 * o1 / (T - 256):.1f}", f"{exact:.1f}", f"{exact / o1:.1f}")
            for T, (o1, exact) in times.items()
        ],
    )
    first, second = ((times[b][0] - times[a][0]) / (b - a) * 1e3 for a, b in ((512, 2048), (2048, 8192)))
    print(f"  slope: {first:.1f} us a row from 512 to 2048, {second:.1f} from 2048 to 8192 (linear: equal)")


def attention_row(B: int, G: int, R: int, T: int, D: int) -> tuple[str, ...]:
    q, k, v, dout = attention_case(B, G, R, T, D)
    geometry = Geometry(T // 2, 128, 4, D**-0.5)
    M = frozen_inverse(q, k, geometry, 32)
    o1, exact, fused = best_ms(
        lambda: run_o1(q, k, v, dout, geometry, 32),
        lambda: run_causal(q, k, v, dout, geometry.scale),
        lambda: run_sdpa(q, k, v, dout),
        rounds=7 if T < 1000 else 3,
    )
    (plain,) = best_ms(lambda: run_plain(q, k, v, dout, M, geometry), rounds=2 if T < 1000 else 1)
    return (
        f"{B} x {G * R} x {T} x {D} ({G} kv heads)",
        *(f"{x:.1f}" for x in (o1, exact, fused, plain)),
        *(f"{x:.2f}" for x in (plain / o1, o1 / fused, exact / fused)),
    )


def bench_attention() -> None:
    table(
        "Attention forward + backward, seal T / 2, window 128, sink 4, m 32; sdpa = torch's fused exact attention",
        (
            "B x H x T x D",
            "O(1)",
            "exact (ours)",
            "sdpa",
            "plain f64 T x T",
            "plain / O(1)",
            "O(1) / sdpa",
            "exact / sdpa",
        ),
        [attention_row(2, 3, 3, 512, 64), attention_row(2, 8, 2, 2048, 128)],
    )


def decode_row(T: int) -> tuple[str, ...]:
    q, k, v, _ = attention_case(3, 3, 3, T, 64)
    state = seal_stream(q, k, v, landmark_count=32, window=128, sink=4, scale=0.125)
    step = [x.contiguous() for x in (q[..., -1, :], k[:, :, -1], v[:, :, -1])]
    served, exact = best_ms(
        lambda: [stream_step(state, *step) for _ in range(50)],
        lambda: [causal_attention_step(step[0], k, v, 0.125) for _ in range(50)],
    )
    return str(T), f"{served / 50:.3f}", f"{exact / 50:.3f}", str(state.nbytes), str(k.nbytes + v.nbytes)


def bench_decode() -> None:
    table(
        "One token of one layer, 3 sequences x 9 heads (3 kv heads) x 64, window 128, sink 4, m 32",
        ("tokens before", "served", "exact", "state bytes", "key and value cache bytes"),
        [decode_row(T) for T in (400, 2000, 8000)],
    )


def delta_row(B: int, G: int, R: int, D: int) -> tuple[str, ...]:
    """512 positions; the loop's backward is torch's autograd."""
    q, k, v, dout = normal(B, G, 512, D), normal(B, G, 512, D), normal(B, G, R, 512, D), normal(B, G, R, 512, D)
    k = k / k.norm(dim=-1, keepdim=True)
    log_g, beta = -normal(B, G, R, 512).abs(), torch.sigmoid(normal(B, G, R, 512))

    def loop_backward() -> None:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, log_g, beta)]
        torch.autograd.grad(step_loop(*leaves)[0], leaves, dout)

    forward, both, loop, loop_both = best_ms(
        lambda: delta_rule_fwd(q, k, v, log_g, beta),
        lambda: delta_rule_bwd(dout, delta_rule_fwd(q, k, v, log_g, beta)[2]),
        lambda: step_loop(q, k, v, log_g, beta),
        loop_backward,
    )
    times = (f"{x:.1f}" for x in (forward, loop, both, loop_both))
    return f"{B} x {G * R} x {D} ({G} key heads)", *times, f"{loop / forward:.1f}", f"{loop_both / both:.1f}"


def bench_delta_rule() -> None:
    table(
        "Gated delta rule over 512 positions against the step-by-step loop; both = forward + backward",
        ("B x heads x dim", "forward", "loop", "both", "loop both", "loop / forward", "loop both / both"),
        [delta_row(*size) for size in ((1, 1, 1, 64), (2, 2, 2, 32), (1, 4, 2, 64), (2, 4, 2, 64), (1, 16, 2, 128))],
    )


def bench_loss() -> None:
    N, V, C = 1024, 49_152, 576
    student, teacher, head = normal(N, C), normal(N, C) / C**0.5, normal(V, C) / C**0.5
    targets = torch.arange(N) % V
    chunk = -(-N // -(-N // chunk_rows(V, 4, COPIES)))
    logits, dhidden = torch.empty(2 * chunk, V), torch.empty(N, C)

    def products() -> None:
        """Student and teacher logits and dhidden, chunk by chunk into standing buffers: nothing but the products."""
        for start in range(0, N, chunk):
            rows = slice(start, min(start + chunk, N))
            n = rows.stop - rows.start
            torch.mm(student[rows], head.T, out=logits[:n])
            torch.mm(teacher[rows], head.T, out=logits[n : 2 * n])
            torch.mm(logits[:n], head, out=dhidden[rows])

    ours, alone, nll, one = best_ms(
        lambda: ce_kl(student, teacher, head, targets, 0.7),
        products,
        lambda: nll_sum(student, head, targets),
        lambda: [torch.mm(student[i : i + chunk], head.T, out=logits[: min(chunk, N - i)]) for i in range(0, N, chunk)],
        rounds=3,
    )
    with PeakMemory() as memory:
        ce_kl(student, teacher, head, targets, 0.7)
    table(
        f"Loss over {N} rows x {V} x {C}, f32",
        ("op", "ms", "products alone", "ratio", "peak extra MB"),
        [
            (
                "ce_kl with gradient",
                f"{ours:.0f}",
                f"{alone:.0f}",
                f"{ours / alone:.2f}",
                f"{memory.peak_bytes / 1e6:.0f}",
            ),
            ("nll_sum", f"{nll:.0f}", f"{one:.0f}", f"{nll / one:.2f}", "-"),
        ],
    )


BENCHES: dict[str, Callable[[], None]] = {
    "pointwise": bench_pointwise,
    "slope": bench_o1_slope,
    "attention": bench_attention,
    "decode": bench_decode,
    "delta": bench_delta_rule,
    "loss": bench_loss,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Timing tables of the kernels.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES))
    parser.add_argument("--cpu-time", action="store_true", help="one thread, CPU time: for a busy machine")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock, options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, f32 unless said otherwise; milliseconds")
    for name in options.only:
        BENCHES[name]()


if __name__ == "__main__":
    main()
