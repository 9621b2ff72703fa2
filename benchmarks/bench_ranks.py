"""How long a step takes by the number of processes, for docs/scaling.md.

    python benchmarks/bench_ranks.py [MODEL.cmf] [--o1 all] [--seq 512] [--batch 2] [--steps 3] [--threads 1]
    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py ... [--shard-optimizer] [--shard-model]

One line of JSON: medians, in seconds, of the step, of its loss and gradient, and of the rest of it (waiting for
transfers, norm, AdamW); with several processes also of the gradient's transfers alone, with nothing else going on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import resolve_conversion
from cortiq_fcd.model.optimizer import Optimizer, ShardedOptimizer
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.model.windows import SplitMix64, training_offsets
from cortiq_fcd.stages import dequantize, replica
from cortiq_fcd.stages.capacity import peak_resident_bytes
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.launch import place
from cortiq_fcd.stages.machine import keep_freed_memory
from cortiq_fcd.stages.polish import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--o1", default="all")
    for name, value in (("seq", 512), ("batch", 2), ("steps", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("--shard-model", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    ranks = joined()
    with as_file(files("cortiq_fcd") / "data" / "demo.cmf") as built_in:
        found = measured(args.model or built_in, args, ranks)
    if ranks.rank == 0:
        print(json.dumps(found))
    ranks.sum([0])


def joined() -> Ranks:
    here = place()
    if here is None:
        return ALONE
    from cortiq_fcd.stages.group import Group

    return Group(here)


def measured(path: Path, args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    with open_model(path) as model:
        plan = plan_model(model)
        kernel: dict[str, Any] = {"m": None, "w": None, "sink": None, "prefill": None}
        setting, _ = resolve_conversion(plan, None, layers=args.o1, seq=args.seq, polish_only=False, **kernel)
        divided = ranks if args.shard_model else None
        weights = dequantize.run(model, plan, torch.device("cpu"), divided=divided)
        network = replica.run(setting, weights, None, ranks, shard_optimizer=args.shard_optimizer)
        optimizer = (ShardedOptimizer if args.shard_optimizer else Optimizer)(network, ranks)
        train = np.random.default_rng(0).integers(0, plan.vocab_size, 20 * args.seq)
        config, generator = TrainConfig(batch=args.batch, seq=args.seq), SplitMix64(0)
        steps, rests = [], []
        for number in range(args.steps + 1):  # the first one is not counted
            offsets = training_offsets(generator, len(train), args.seq, args.batch)
            before = network.clock.seconds.get("optimizer", 0.0)
            steps.append(train_step(config, network, optimizer, train, offsets, number).seconds)
            rests.append(network.clock.seconds["optimizer"] - before)
        transfers = [transferred(optimizer) for _ in range(args.steps)]
    of_steps = [step - rest for step, rest in zip(steps, rests, strict=True)]
    return {
        "processes": ranks.world,
        "batch": args.batch,
        "seq": args.seq,
        "trained": network.masters.flat.numel(),
        "step": statistics.median(steps[1:]),
        "gradient": statistics.median(of_steps[1:]),
        "rest": statistics.median(rests[1:]),
        "transfers": statistics.median(transfers) if ranks.world > 1 else 0.0,
        "peak_rss_bytes": peak_resident_bytes(),
    }


def transferred(optimizer: Any) -> float:
    """Sum the gradient and gather, as a step does, with no backward beside it."""
    began = time.perf_counter()
    optimizer.gradient_norm()
    optimizer.skip()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
