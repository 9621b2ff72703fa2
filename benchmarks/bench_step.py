"""One training step against its own matrix products and against autograd, side by side in one run.

    python benchmarks/bench_step.py [MODEL.cmf] [--o1 all] [--seq 512] [--batch 2] [--steps 5] [--json FILE]

The three take turns, step by step, and medians are compared, so that a busy moment hits all of them. Run it alone: with
other work on the machine the ratios mean little. Without a model the built-in demo model is used.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.autograd_peer import Peer
from cortiq_fcd.errors import CortiqError
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.kernels.products import mm, set_precision
from cortiq_fcd.model.conversion import resolve_conversion
from cortiq_fcd.model.optimizer import Optimizer
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.replica import Replica
from cortiq_fcd.model.windows import SplitMix64, training_offsets, windows
from cortiq_fcd.stages import dequantize, replica
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.machine import keep_freed_memory
from cortiq_fcd.stages.polish import train_step


class ProductLog(TorchDispatchMode):
    """Writes down the shapes and strides of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[torch.Size, tuple[int, ...]], ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.calls.append(tuple((a.shape, a.stride()) for a in args[:2]))
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.addmm.out):
            self.calls.append(tuple((a.shape, a.stride()) for a in args[1:3]))
        return func(*args, **(kwargs or {}))


def products_alone(log: ProductLog) -> tuple[Callable[[], None], float]:
    """A function that runs the logged products and nothing else, into buffers made beforehand; and their TFLOP."""
    pool: dict[tuple[torch.Size, tuple[int, ...]], Tensor] = {}
    for call in log.calls:
        for shape, stride in call:
            if (shape, stride) not in pool:
                values = torch.randn(shape[0] * stride[0] if stride[0] >= stride[1] else shape[1] * stride[1])
                pool[shape, stride] = values.as_strided(shape, stride)
    out = {(a[0][0], b[0][1]): torch.empty(a[0][0], b[0][1]) for a, b in log.calls}
    flop = sum(2 * a[0][0] * a[0][1] * b[0][1] for a, b in log.calls)

    def run() -> None:
        for a, b in log.calls:
            mm(pool[a], pool[b], out=out[a[0][0], b[0][1]])

    return run, flop / 1e12


def load(path: Path, args: argparse.Namespace) -> tuple[Replica, dict[str, Tensor]]:
    """The replica, and the tensors by name for the peer."""
    with open_model(path) as model:
        plan = plan_model(model)
        setting, _ = resolve_conversion(
            plan,
            model.header.get("provenance"),
            layers=f"deep{min(8, max(1, len(plan.layers) // 2))}" if args.o1 == "deep" else args.o1,
            m=args.m,
            w=args.window,
            sink=args.sink,
            prefill=args.prefill,
            seq=args.seq,
        )
        network = replica.run(setting, dequantize.run(model, plan, torch.device("cpu")))
        tensors = {name: torch.from_numpy(model.decode(name)) for name in plan.shapes} if args.peer else {}
    return network, tensors


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--o1", help="as for polish; deep: the deepest 8 layers, or half of them")
    parser.add_argument("--m", type=int)
    parser.add_argument("--window", type=int)
    parser.add_argument("--sink", type=int)
    parser.add_argument("--prefill", type=int)
    for name, value in (("seq", 512), ("batch", 2), ("steps", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave autograd out (and its memory)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as every command does
    set_precision(args.precision)
    if args.model is None:
        with as_file(files("cortiq_fcd") / "data" / "demo.cmf") as built_in:
            network, tensors = load(built_in, args)
    else:
        network, tensors = load(args.model, args)
    figures = measure(network, tensors, args)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(network: Replica, tensors: dict[str, Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every step of the three, taking turns; the first of each is not counted."""
    config = TrainConfig(batch=args.batch, seq=args.seq)
    vocabulary = network.weights.plan.vocab_size
    train = np.random.default_rng(0).integers(0, vocabulary, 20 * args.seq)
    generator, optimizer = SplitMix64(0), Optimizer(network)
    offsets = [training_offsets(generator, len(train), args.seq, args.batch) for _ in range(args.steps + 1)]
    with ProductLog() as log:
        train_step(config, network, optimizer, train, offsets[0], 1)
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    floor, tflop = products_alone(log)
    peer = Peer(network.weights.plan, tensors, network.conversion, config.lr) if args.peer else None
    seconds: dict[str, list[float]] = {"step": [], "products": [], "autograd": []}
    for number in range(1, args.steps + 1):
        at = offsets[number]
        seconds["step"].append(timed(partial(train_step, config, network, optimizer, train, at, number)))
        seconds["products"].append(timed(floor))
        if peer:
            ids, targets = windows(train, at, args.seq, torch.device("cpu"))
            seconds["autograd"].append(timed(partial(peer.step, ids, targets, config.kl)))
    plan, setting = network.weights.plan, network.conversion
    return {
        "model": f"{plan.arch_name}, {plan.params:,} weights, {len(setting.layers)} of {len(plan.layers)} layers",
        "layers": len(setting.layers),
        "o1": setting.record() | {"seal": setting.seal},
        "batch": args.batch,
        "seq": args.seq,
        "threads": args.threads,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "products_tflop": tflop,
        "peak_rss_bytes": rss_bytes,
        "seconds": seconds,
    }


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def show(figures: dict[str, Any]) -> None:
    """The table."""
    print(f"{figures['model']}; batch {figures['batch']} x {figures['seq']}; {figures['o1']}")
    print(f"{figures['machine']}, {figures['threads']} threads, torch {figures['torch']}")
    median = {name: statistics.median(s) for name, s in figures["seconds"].items() if s}
    print(f"{'':28}{'median s':>10}{'min':>8}{'max':>8}{'of its products':>18}")
    names = {"step": "one training step", "products": "its products, nothing else", "autograd": "autograd peer"}
    for name, value in median.items():
        low, high = min(figures["seconds"][name]), max(figures["seconds"][name])
        print(f"{names[name]:28}{value:10.3f}{low:8.3f}{high:8.3f}{value / median['products']:17.2f}x")
    rate = figures["products_tflop"] / median["products"]
    print(f"products: {figures['products_tflop']:.3f} TFLOP a step, {1000 * rate:.0f} GFLOP/s; ", end="")
    if "autograd" in median:
        print(f"step / autograd: {median['step'] / median['autograd']:.2f}; ", end="")
    print(f"peak memory of the step alone {figures['peak_rss_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    try:
        main()
    except (CortiqError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
