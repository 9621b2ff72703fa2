"""Training by several processes on this machine; run as a program, it is one of them.

`python -m tests.stages.ranks_at_work FOLDER CASE ...` trains with the place that the environment gives, and writes what
came out to FOLDER/rank-R.npz.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cortiq_fcd.io.corpus import load_corpus
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.model.conversion import Conversion, resolve_conversion
from cortiq_fcd.model.optimizer import Optimizer
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import loss_and_gradient
from cortiq_fcd.model.windows import windows
from cortiq_fcd.stages import dequantize, polish, replica
from cortiq_fcd.stages.config import TrainConfig
from tests.fixtures import GOLDEN, golden_json

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
LONGEST_S = 600.0
Found = dict[str, np.ndarray]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process."""
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return (
        os.environ
        | {name: str(value) for name, value in place.items()}
        | {
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def started(command: Sequence[str], world: int, **options: Any) -> list[subprocess.Popen[str]]:
    """The processes of a run, as torchrun would start them."""
    port = free_port()
    return [
        subprocess.Popen(command, env=environment(rank, world, port), stderr=subprocess.PIPE, text=True, **options)
        for rank in range(world)
    ]


def cases() -> list[str]:
    return ["demo", *(["qwen3-all", "hybrid-all"] if GOLDEN.is_dir() else [])]


def trained(case: str, ranks: Ranks = ALONE) -> Found:
    """Losses of each step, and the masters at the end."""
    config, network, train, val = prepared(case, ranks)
    result = polish.run(config, network, train, val, None, lambda event: None, ranks=ranks)
    return {
        "ce": np.array([step.ce for step in result.steps]),
        "kl": np.array([step.kl for step in result.steps]),
        "ppl": np.array([evaluation.ppl for evaluation in result.evaluations]),
        "masters": network.masters.flat.numpy().copy(),
    }


def prepared(case: str, ranks: Ranks) -> tuple[TrainConfig, replica.Replica, np.ndarray, np.ndarray]:
    """What to train, and training and validation ids."""
    return _demo(ranks) if case == "demo" else _golden(case, ranks)


def _demo(ranks: Ranks) -> tuple[TrainConfig, replica.Replica, np.ndarray, np.ndarray]:
    with open_model(ROOT / "cortiq_fcd/data/demo.cmf") as model:
        plan = plan_model(model)
        weights = dequantize.run(model, plan, torch.device("cpu"))
        corpus = load_corpus(train=None, val=None, max_train_bytes=60_000, max_val_bytes=20_000, model=model)
        kernel = {"layers": "all", "m": 16, "w": 8, "sink": 4, "prefill": None, "seq": 96, "polish_only": False}
        setting, _ = resolve_conversion(plan, None, **kernel)
    config = TrainConfig(steps=STEPS, seq=96, batch=2, lr=1e-4, eval_every=10)
    return config, replica.run(setting, weights, None, ranks), corpus.train, corpus.val


def _golden(name: str, ranks: Ranks) -> tuple[TrainConfig, replica.Replica, np.ndarray, np.ndarray]:
    record = golden_json(f"trajectories/{name}.json")
    options = record["options"]
    train, val = (np.load(GOLDEN / record[key]).astype(np.int64) for key in ("train_ids", "val_ids"))
    with open_model(GOLDEN / record["model"]) as model:
        plan = plan_model(model)
        weights = dequantize.run(model, plan, torch.device("cpu"))
    layers = tuple(i for i, layer in enumerate(plan.layers) if not layer.mixer.obstacle)
    kernel = {name: options[name] for name in ("m", "w", "sink", "polish_only")}
    setting = Conversion(layers, "all", seal=record["derived"]["seal_point"], **kernel)
    names = ("seq", "batch", "eval_every", "seed")
    rates = {"lr": float(options["lr"]), "kl": float(options["kl"])}
    config = TrainConfig(steps=STEPS, **{name: options[name] for name in names}, **rates)
    return config, replica.run(setting, weights, None, ranks), train, val


def sent_by_a_step(case: str, group: Any) -> tuple[int, int, int]:
    """Bytes that this rank sent in a step by its own count, those that its sockets received, and weights trained."""
    config, network, train, _ = prepared(case, group)
    optimizer = Optimizer(network, group)
    group.sum([0])
    counted, received = group.sent_bytes, received_bytes()
    polish.train_step(config, network, optimizer, train, [0, 40], 1)
    return group.sent_bytes - counted, received_bytes() - received, network.masters.flat.numel()


def summed_gradient(case: str, group: Any, bucket_elements: int) -> np.ndarray:
    """The gradient of a step, summed in buckets of this size."""
    config, network, train, _ = prepared(case, group)
    optimizer = Optimizer(network, group, bucket_elements=bucket_elements)
    offsets = list(share(group, [0, 40]))
    ids, targets = windows(train, offsets, config.seq, torch.device("cpu"))
    loss_and_gradient(network, ids, targets, config.kl, optimizer.layer_done)
    optimizer.gradient_norm()
    return network.gradient.flat.numpy().copy()


def received_bytes() -> int:
    """By all TCP connections of this process, as the kernel counts (tcpi_bytes_received)."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            copy = os.dup(int(descriptor.name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=copy) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:
            continue
        total += int.from_bytes(info[128:136], sys.byteorder)
    return total


def main() -> None:
    from cortiq_fcd.stages.group import Group
    from cortiq_fcd.stages.launch import place

    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    here = place()
    assert here is not None
    group = Group(here)
    found: Found = {}
    taken: list[tuple[int, ...]] = []

    def counting(ids: Any, offsets: list[int], *more: Any) -> Any:
        taken.append(tuple(offsets))
        return windows(ids, offsets, *more)

    polish.windows = counting  # type: ignore[attr-defined]
    for case in sys.argv[2:]:
        taken.clear()
        for name, values in trained(case, group).items():
            found[f"{case}/{name}"] = values
        found[f"{case}/windows"] = np.array(taken)
    for elements in (5000, 1 << 24):
        found[f"gradient/{elements}"] = summed_gradient(sys.argv[2], group, elements)
    found["sent"] = np.array(sent_by_a_step(sys.argv[2], group))
    np.savez(Path(sys.argv[1]) / f"rank-{here.rank}.npz", **found)
    group.sum([0])
    os._exit(0)


if __name__ == "__main__":
    main()
