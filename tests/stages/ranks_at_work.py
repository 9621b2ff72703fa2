"""Training by several processes on this machine; run as a program, it is one of them.

`python -m tests.stages.ranks_at_work FOLDER CASE ...` trains each case with everything divided that can be, with the
place that the environment gives, and writes what came out to FOLDER/rank-R.npz.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cortiq_fcd.io.corpus import load_corpus
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.model.conversion import Conversion, resolve_conversion
from cortiq_fcd.model.layer_parts import Part
from cortiq_fcd.model.optimizer import AnyOptimizer, Optimizer, ShardedOptimizer
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.model.ranks import ALONE, Ranks, share
from cortiq_fcd.model.replica import Replica, loss_and_gradient
from cortiq_fcd.model.weights import FrozenWeights
from cortiq_fcd.model.windows import windows
from cortiq_fcd.stages import dequantize, polish, replica
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.savings import unused_parts
from cortiq_fcd.stages.sharding import Sharding
from cortiq_fcd.stages.works import Sizes
from tests.fixtures import GOLDEN, Tiny, golden_json

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "cortiq_fcd/data/demo.cmf"
STEPS = 20
LONGEST_S = 600.0
Found = dict[str, np.ndarray]


class Mode(NamedTuple):
    """What is divided, beside the windows."""

    optimizer: bool
    model: bool

    def __str__(self) -> str:
        return "+".join(["windows", *["optimizer"] * self.optimizer, *["model"] * self.model])


WINDOWS, OPTIMIZER, MODEL, BOTH = MODES = (Mode(False, False), Mode(True, False), Mode(False, True), Mode(True, True))


@dataclass(frozen=True)
class Prepared:
    """What to train, and on which ids."""

    config: TrainConfig
    network: Replica
    train: np.ndarray
    val: np.ndarray

    def sizes(self, world: int, mode: Mode) -> Sizes:
        """As a polish by so many processes would have them."""
        network = self.network
        teacher = None if network.teacher is network.weights else network.teacher.plan
        return Sizes(
            network.weights.plan, teacher, network.conversion, self.config, 0, 0, 0, 0, Sharding(world, world, *mode)
        )


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
    """Models to train: the demo's, one whose layers run twice, one with a teacher of its own, and golden ones."""
    return ["demo", "looped", "taught", *(["qwen3-all", "hybrid-all"] if GOLDEN.is_dir() else [])]


def trained(case: str, ranks: Ranks = ALONE, mode: Mode = WINDOWS) -> Found:
    """Losses of each step, and the masters at the end."""
    with prepared(case, ranks, mode) as job:
        result = polish.run(
            job.config,
            job.network,
            job.train,
            job.val,
            None,
            lambda event: None,
            ranks=ranks,
            shard_optimizer=mode.optimizer,
        )
    return {
        "ce": np.array([step.ce for step in result.steps]),
        "kl": np.array([step.kl for step in result.steps]),
        "norm": np.array([step.grad_norm for step in result.steps]),
        "ppl": np.array([evaluation.ppl for evaluation in result.evaluations]),
        "masters": job.network.masters.flat.numpy().copy(),
    }


@contextlib.contextmanager
def prepared(case: str, ranks: Ranks = ALONE, mode: Mode = WINDOWS) -> Iterator[Prepared]:
    """The files stay open inside the block."""
    if case in ("demo", "taught"):
        with open_model(DEMO) as model:
            yield _demo(model, ranks, mode, taught=case == "taught")
    elif case == "looped":
        with tempfile.TemporaryDirectory() as folder:
            path = Tiny(layers=3, arch={"num_loops": 2}).write(Path(folder) / "in.cmf")
            with open_model(path) as model:
                yield _looped(model, ranks, mode)
    else:
        record = golden_json(f"trajectories/{case}.json")
        with open_model(GOLDEN / record["model"]) as model:
            yield _golden(model, record, ranks, mode)


def _demo(model: CmfModel, ranks: Ranks, mode: Mode, *, taught: bool) -> Prepared:
    plan = plan_model(model)
    corpus = load_corpus(train=None, val=None, max_train_bytes=60_000, max_val_bytes=20_000, model=model)
    layers = "deep2" if taught else "all"
    kernel = {"layers": layers, "m": 16, "w": 8, "sink": 4, "prefill": None, "seq": 96, "polish_only": False}
    setting, _ = resolve_conversion(plan, None, **kernel)
    config = TrainConfig(steps=STEPS, seq=96, batch=2, lr=1e-4, eval_every=10)
    network = _network(model, plan, setting, ranks, mode, taught=taught)
    return Prepared(config, network, corpus.train, corpus.val)


def _looped(model: CmfModel, ranks: Ranks, mode: Mode) -> Prepared:
    ids = np.random.default_rng(0).integers(0, 28, 2000)
    config = TrainConfig(steps=STEPS, seq=40, batch=2, lr=1e-3, eval_every=10)
    setting = Conversion((1, 2), "1,2", m=4, w=5, sink=2, seal=20)
    network = _network(model, plan_model(model), setting, ranks, mode)
    return Prepared(config, network, ids[:1500], ids[1500:])


def _golden(model: CmfModel, record: dict[str, Any], ranks: Ranks, mode: Mode) -> Prepared:
    options = record["options"]
    train, val = (np.load(GOLDEN / record[key]).astype(np.int64) for key in ("train_ids", "val_ids"))
    plan = plan_model(model)
    layers = tuple(i for i, layer in enumerate(plan.layers) if not layer.mixer.obstacle)
    kernel = {name: options[name] for name in ("m", "w", "sink", "polish_only")}
    setting = Conversion(layers, "all", seal=record["derived"]["seal_point"], **kernel)
    names = ("seq", "batch", "eval_every", "seed")
    rates = {"lr": float(options["lr"]), "kl": float(options["kl"])}
    config = TrainConfig(steps=STEPS, **{name: options[name] for name in names}, **rates)
    return Prepared(config, _network(model, plan, setting, ranks, mode), train, val)


def _network(
    model: CmfModel, plan: ModelPlan, setting: Conversion, ranks: Ranks, mode: Mode, *, taught: bool = False
) -> Replica:
    divided = ranks if mode.model else None

    def load(streamed: frozenset[Part]) -> FrozenWeights:
        return dequantize.run(model, plan, torch.device("cpu"), streamed, None, divided)

    teacher = load(frozenset()) if taught else None
    weights = load(unused_parts(setting, plan if taught else None))
    return replica.run(setting, weights, teacher, ranks, shard_optimizer=mode.optimizer)


def new_optimizer(network: Replica, ranks: Ranks, mode: Mode, **options: int) -> AnyOptimizer:
    return (ShardedOptimizer if mode.optimizer else Optimizer)(network, ranks, **options)


def sent_by_a_step(case: str, group: Any, mode: Mode) -> tuple[int, int]:
    """Bytes that this rank sent in a step by its own count, and those that its sockets received."""
    with prepared(case, group, mode) as job:
        optimizer = new_optimizer(job.network, group, mode)
        polish.train_step(job.config, job.network, optimizer, job.train, [0, 40], 1)
        group.sum([0])
        counted, received = group.sent_bytes, received_bytes()
        polish.train_step(job.config, job.network, optimizer, job.train, [0, 40], 2)
    return group.sent_bytes - counted, received_bytes() - received


def summed_gradient(case: str, group: Any, bucket_elements: int) -> np.ndarray:
    """The gradient of a step, summed in buckets of this size."""
    with prepared(case, group) as job:
        optimizer = Optimizer(job.network, group, bucket_elements=bucket_elements)
        offsets = list(share(group, [0, 40]))
        ids, targets = windows(job.train, offsets, job.config.seq, torch.device("cpu"))
        loss_and_gradient(job.network, ids, targets, job.config.kl, optimizer.layer_done)
        optimizer.gradient_norm()
    return job.network.gradient.flat.numpy().copy()


def stepped(case: str, group: Any, mode: Mode, bucket_elements: int) -> np.ndarray:
    """The masters after a step that was skipped and one that was taken, in buckets of this size."""
    with prepared(case, group, mode) as job:
        optimizer = new_optimizer(job.network, group, mode, bucket_elements=bucket_elements)
        offsets = list(share(group, [0, 40]))
        ids, targets = windows(job.train, offsets, job.config.seq, torch.device("cpu"))
        for skipped in (True, False):
            loss_and_gradient(job.network, ids, targets, job.config.kl, optimizer.layer_done)
            norm = optimizer.gradient_norm()
            optimizer.skip() if skipped else optimizer.step(1e-4, norm)
    return job.network.masters.flat.numpy().copy()


def bytes_of_optimizer(case: str, group: Any, mode: Mode) -> tuple[int, int]:
    """Memory of masters, moments and gradient, copies included; and of the gradient alone."""
    with prepared(case, group, mode) as job:
        optimizer, network = new_optimizer(job.network, group, mode), job.network
        tensors = (network.masters.padded, network.gradient.padded, optimizer.masters)
        tensors += (optimizer.moments.first, optimizer.moments.second)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), network.gradient.padded.nbytes


def frozen_bytes(case: str, group: Any, mode: Mode) -> int:
    """Memory of the matrices of frozen layers on this rank, without the buffers that others come into."""
    with prepared(case, group, mode) as job:
        streaming = job.network.weights.streaming
        if mode.model:
            return int(streaming.source.own_bytes)  # type: ignore[union-attr]
        layers = job.network.weights.layers
    total = 0
    for layer in layers:
        mixer = vars(layer.mixer)
        names = ("qkv", "gate", "o", "in_proj", "out_proj")
        matrices = [layer.gate_up, layer.down, *(mixer[name] for name in names if mixer.get(name) is not None)]
        total += sum(matrix.nbytes for matrix in matrices)
    return total


def received_bytes() -> int:
    """By all TCP connections of this process, as the kernel counts (tcpi_bytes_received)."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not descriptor.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
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
        for mode in MODES:
            taken.clear()
            for name, values in trained(case, group, mode).items():
                found[f"{mode}/{case}/{name}"] = values
            found[f"{mode}/{case}/windows"] = np.array(taken)
            found[f"{mode}/{case}/sent"] = np.array(sent_by_a_step(case, group, mode))
            found[f"{mode}/{case}/optimizer"] = np.array(bytes_of_optimizer(case, group, mode))
            found[f"{mode}/{case}/frozen"] = np.array(frozen_bytes(case, group, mode))
    for elements in (5000, 1 << 24):
        found[f"gradient/{elements}"] = summed_gradient(sys.argv[2], group, elements)
        for mode in (WINDOWS, OPTIMIZER):
            found[f"{mode}/stepped/{elements}"] = stepped(sys.argv[2], group, mode, elements)
    np.savez(Path(sys.argv[1]) / f"rank-{here.rank}.npz", **found)
    group.sum([0])
    os._exit(0)


if __name__ == "__main__":
    main()
