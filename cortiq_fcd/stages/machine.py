"""The machine that a polish runs on: device, threads, memory, versions."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib.metadata import version

import torch

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.kernels import products
from cortiq_fcd.model.ranks import ALONE, Ranks
from cortiq_fcd.stages.capacity import peak_resident_bytes
from cortiq_fcd.stages.config import ComputeConfig
from cortiq_fcd.stages.report import MemoryInfo, ToolInfo

MOST_THREADS = 1024  # and more only where there are more CPUs: each costs memory, and OpenMP aborts when it has no more

# Of glibc's malloc.h. Tensors up to KEPT_BYTES are cut from memory that the process keeps when they are freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Let freed memory serve the next tensor instead of the system, which zeroes every page anew that it hands out.

    Up to a tenth of a training step went into that. Does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never


def choose_device(config: ComputeConfig, ranks: Ranks = ALONE) -> torch.device:
    """The device to run on, with threads, memory and precision set. Raises ConfigError for what is not there.

    Ranks on one machine divide its CPUs, and each takes a CUDA device of its own.
    """
    if config.threads is not None and config.threads > max(MOST_THREADS, _usable_cpus()):
        raise ConfigError(
            f"--threads {config.threads}: this machine has {_usable_cpus()} CPUs", hint=f"at most {MOST_THREADS}"
        )
    torch.set_num_threads(config.threads or max(1, _usable_cpus() // ranks.local_world))
    keep_freed_memory()
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.world > 1 and wanted.startswith("cuda"):
        if wanted != "cuda":
            raise ConfigError(f"--device {wanted}: each process takes a device of its own", hint="use --device cuda")
        wanted = f"cuda:{ranks.local_rank}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"--device {wanted!r} is not a device", hint="use auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--device {wanted}: the landmark inverse needs 64-bit floats, which this kind of device lacks",
            hint="use --device cpu",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {wanted}: torch finds {torch.cuda.device_count()} CUDA devices", hint="use --device cpu"
        )
    products.set_precision(_precision(config, device))
    return device


def _precision(config: ComputeConfig, device: torch.device) -> products.Precision:
    """Auto is f32: 50 steps of bf16 left a real model 1 % behind in perplexity; see docs/performance.md."""
    if config.precision != "bf16":
        return "f32"
    if not (products.cpu_has_bf16() if device.type == "cpu" else torch.cuda.is_bf16_supported()):
        raise ConfigError(
            f"--precision bf16: {device} has no units that multiply bf16, or this torch ({torch.__version__}) can't use"
            " them",
            hint="use --precision f32",
        )
    return "bf16"


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tool_info(device: torch.device, ranks: Ranks = ALONE) -> ToolInfo:
    """What wrote the file, and what it ran on."""
    return ToolInfo(
        name="cortiq-fcd",
        version=version("cortiq-fcd"),
        torch=torch.__version__,
        python=platform.python_version(),
        device=str(device),
        precision=products.get_precision(),
        threads=torch.get_num_threads(),
        world_size=ranks.world,
    )


def memory_of_ranks(device: torch.device, ranks: Ranks) -> list[MemoryInfo]:
    """Peak memory of every process so far."""
    own = memory_info(device)
    known = [0] * 2 * ranks.world
    known[2 * ranks.rank : 2 * ranks.rank + 2] = own.peak_rss_bytes or 0, own.peak_device_bytes or 0
    told = [int(value) or None for value in ranks.sum(known)]
    return [
        MemoryInfo(peak_rss_bytes=rss, peak_device_bytes=on_device)
        for rss, on_device in zip(told[::2], told[1::2], strict=True)
    ]


def most_memory(of_ranks: list[MemoryInfo]) -> MemoryInfo:
    """The most that any process has used."""
    rss = max((info.peak_rss_bytes or 0 for info in of_ranks), default=0)
    on_device = max((info.peak_device_bytes or 0 for info in of_ranks), default=0)
    return MemoryInfo(peak_rss_bytes=rss or None, peak_device_bytes=on_device or None)


def memory_info(device: torch.device) -> MemoryInfo:
    """Peak memory of this process so far."""
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return MemoryInfo(peak_rss_bytes=peak_resident_bytes(), peak_device_bytes=on_device)
