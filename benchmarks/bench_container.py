"""Rates of the container: hash64, decoding by dtype, opening and dequantising a 280 MB f16 model.

Best of a few runs by the wall clock, in bytes of f32 output (hash64: of input) a second, beside the rate for the
processor time of that run: on a busy machine the two differ. Targets are compared with the wall clock.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cortiq_fcd.io.codecs import CODECS
from cortiq_fcd.io.hashing import hash64
from cortiq_fcd.io.layout import RESERVED_DTYPES, DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.io.writer import create_model, write_model

RUNS = 7
ROWS, COLS = 4096, 4096
TARGETS = dict.fromkeys(DType, 500.0) | {
    DType.F16: 1000.0,
    DType.VBIT: 150.0,
    DType.VBIT_RO: 150.0,
    DType.Q1T: 150.0,
}


def best_s(work: Callable[[], object], runs: int = RUNS) -> tuple[float, float]:
    """Wall and processor seconds of the fastest run."""
    times = []
    for _ in range(runs):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(times)


def rate(what: str, nbytes: int, seconds: tuple[float, float], target_mb: float) -> None:
    wall, processor = (nbytes / max(s, 1e-9) / 1e6 for s in seconds)
    print(f"{what:<30}{wall:>8.0f} MB/s{processor:>8.0f} MB/s   >= {target_mb:>5.0f}{missed(wall < target_mb)}")


def duration(what: str, seconds: tuple[float, float], target_ms: float | None = None) -> None:
    wall, processor = (1e3 * s for s in seconds)
    target = "" if target_ms is None else f"   <= {target_ms:>5.0f}{missed(wall > target_ms)}"
    print(f"{what:<30}{wall:>8.1f} ms  {processor:>8.1f} ms  {target}")


def missed(yes: bool) -> str:
    return "  MISSED" if yes else ""


def payload_of(dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Random weights encoded, or for dtypes without an encoder random bytes between valid fields."""
    n, groups = ROWS * COLS, COLS // 32
    encode = CODECS[dtype].encode
    if dtype in (DType.VBIT, DType.VBIT_RO):
        widths = rng.choice([3, 4, 5, 6, 8], ROWS).astype(np.uint8)
        starts = np.concatenate([[0], np.cumsum(widths.astype(np.int64) * groups * 4)])
        table = starts.astype("<u4").tobytes() if dtype == DType.VBIT_RO else b""
        scales = rng.random(n // 32).astype("<f2").tobytes()
        return np.frombuffer(widths.tobytes() + scales + table + rng.bytes(int(starts[-1])), np.uint8)
    if dtype == DType.Q1S:
        entries = np.zeros(n // 100, [("index", "<u4"), ("value", "<f2")])
        entries["index"] = rng.integers(0, n, entries.size)
        head = rng.bytes(n // 32 * 6) + np.uint32(entries.size).tobytes()
        return np.frombuffer(head + entries.tobytes(), np.uint8)
    if dtype == DType.Q1T:
        entries = np.zeros(ROWS * (COLS // 100), [("col", "<u2"), ("value", "<f2")])
        entries["col"] = rng.integers(0, COLS, entries.size)
        pointers = (np.arange(ROWS + 1) * (COLS // 100)).astype("<u4")
        return np.frombuffer(rng.bytes(n // 32 * 9) + pointers.tobytes() + entries.tobytes(), np.uint8)
    if encode is not None:
        return encode((rng.standard_normal((ROWS, COLS)) * 0.02).astype(np.float32))
    return np.frombuffer(rng.bytes(CODECS[dtype].nbytes((ROWS, COLS))), np.uint8)


def main() -> None:
    rng = np.random.default_rng(0)
    load = ", load " + " ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else ""
    print(f"numpy {np.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores{load}\n")
    print(f"{'':<30}{'wall':>13}{'processor':>13}   target")
    data = np.frombuffer(rng.bytes(256 << 20), np.uint8)
    rate("hash64 of 256 MiB", data.size, best_s(partial(hash64, data)), 2000)
    for dtype, codec in CODECS.items():
        if dtype not in RESERVED_DTYPES:
            work = partial(codec.decode, payload_of(dtype, rng), (ROWS, COLS))
            rate(f"decode {dtype.label}", 4 * ROWS * COLS, best_s(work), TARGETS[dtype])
    with tempfile.TemporaryDirectory() as folder:
        bench_model(Path(folder), rng)


def bench_model(folder: Path, rng: np.random.Generator) -> None:
    path, out = folder / "model.cmf", folder / "out.cmf"
    halves = (rng.standard_normal((1536, 576)) * 0.02).astype(np.float16).view(np.uint8)
    count = 280_000_000 // halves.nbytes + 1
    header = {"format": "cmf", "version": 2, "arch": {}}
    tensors = [(f"model.layers.{k}.weight", DType.F16, (1536, 576), lambda: halves) for k in range(count)]
    create_model(path, header=header, tensors=tensors)

    def open_and_close() -> None:
        open_model(path).close()

    def dequantise() -> None:
        with open_model(path) as model:
            for name in model.tensors:
                model.decode(name)

    def rewrite() -> None:
        with open_model(path) as model:
            write_model(model, out, header=model.header, replace={}, force=True)

    print(f"\n{path.stat().st_size / 1e6:.0f} MB of f16 in {count} tensors, in the page cache")
    duration("open", best_s(open_and_close), 50)
    duration("dequantise, hashes checked", best_s(dequantise, 3), 2000)
    duration("verify", best_s(partial(verify_model, path), 3))
    duration("rewrite, synced and verified", best_s(rewrite, 2))


if __name__ == "__main__":
    main()
