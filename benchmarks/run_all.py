"""Everything that is claimed about speed, in one table and one JSON file.

    python benchmarks/run_all.py [MODEL.cmf] [--steps 5] [--json benchmarks.json]

Each row is measured in a process of its own. Run it alone: on a machine that does other work the ratios mean little.
Without a model the built-in demo model is used, whose products are too small to say much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEAL = 256  # of the windows whose lengths are compared


@dataclass(frozen=True)
class Row:
    """One figure; `goal` is what it is held against, and smaller is better."""

    name: str
    value: float
    unit: str
    goal: float | None = None

    def line(self) -> str:
        """The row of the table."""
        goal = "" if self.goal is None else f"{self.goal:>8g} {'met' if self.value <= self.goal else 'MISSED'}"
        return f"{self.name:58}{self.value:10.3f} {self.unit:4}{goal}"


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a row")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"))
    args = parser.parse_args()
    runs = step_runs(args.model, args.steps)
    rows = step_rows(runs)
    if args.model is None:
        rows = [replace(row, goal=None) for row in rows]
    any_run = next(iter(runs.values()))
    print(f"{any_run['model']}; {any_run['o1']}\n{machine()}, {any_run['machine']}, torch {any_run['torch']}")
    print(f"{any_run['threads']} threads, medians of {args.steps} steps, load {os.getloadavg()[0]:.1f}\n")
    print(f"{'':58}{'':>10}     {'at most':>8}")
    for row in rows:
        print(row.line())
    args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "runs": runs}, indent=1) + "\n")
    print(f"\nevery time of every step: {args.json}\n", flush=True)
    subprocess.run([sys.executable, str(HERE / "bench_kernels.py")], check=True)


def step_runs(model: Path | None, steps: int) -> dict[str, dict[str, Any]]:
    """The step in its variants, by name: bench_step.py's figures."""
    small = ["--seq", "256", "--batch", "8", "--prefill", "128"] if model is None else []
    long = ("--prefill", str(SEAL), "--no-peer")
    runs = {
        "f32": [*small],
        "f32, threads asleep": ["--no-peer", *small],
        "bf16": ["--precision", "bf16", "--no-peer", *small],
        "deep": ["--o1", "deep", "--no-peer", *small],
        "short windows": ["--seq", "512", "--batch", "4", *long],
        "long windows": ["--seq", "2048", "--batch", "1", *long],
    }
    return {
        name: bench_step(model, ["--steps", str(steps), *flags], asleep="asleep" in name)
        for name, flags in runs.items()
    }


def bench_step(model: Path | None, flags: list[str], *, asleep: bool) -> dict[str, Any]:
    """Figures of one run of bench_step.py; `asleep`: threads that wait for each other sleep, as on a busy machine."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / "bench_step.py"), *([str(model)] if model else []), *flags]
        environment = os.environ | ({"OMP_WAIT_POLICY": "PASSIVE"} if asleep else {})
        subprocess.run([*command, "--json", str(figures)], check=True, stdout=sys.stderr, env=environment)
        return dict(json.loads(figures.read_text()))


def step_rows(runs: dict[str, dict[str, Any]]) -> list[Row]:
    """The ratios that are claimed, and what they are made of."""
    median = {
        name: {part: statistics.median(times) for part, times in run["seconds"].items() if times}
        for name, run in runs.items()
    }
    f32, asleep, bf16, deep = median["f32"], median["f32, threads asleep"], median["bf16"], median["deep"]
    tokens = {name: run["batch"] * run["seq"] for name, run in runs.items()}
    short, long = (median[name]["step"] / tokens[name] for name in ("short windows", "long windows"))
    return [
        Row("step, f32", f32["step"], "s"),
        Row("its matrix products alone, f32", f32["products"], "s"),
        Row("step / its products, f32", f32["step"] / f32["products"], "x", 1.5),
        Row("step with OMP_WAIT_POLICY=PASSIVE, as on a busy machine", asleep["step"], "s"),
        Row("autograd peer, f32", f32["autograd"], "s"),
        Row("step / autograd peer, f32", f32["step"] / f32["autograd"], "x", 0.6),
        Row("step, bf16", bf16["step"], "s"),
        Row("its matrix products alone, bf16", bf16["products"], "s"),
        Row("step / its products, bf16", bf16["step"] / bf16["products"], "x", 2.2),
        Row("step bf16 / step f32", bf16["step"] / f32["step"], "x"),
        Row(f"{runs['deep']['layers']} layers / all layers, f32", deep["step"] / f32["step"], "x", 0.65),
        Row("the same of the products alone", deep["products"] / f32["products"], "x"),
        Row(f"time a token, windows of 2048 / 512, sealed at {SEAL}", long / short, "x", 1.25),
        Row("peak memory, all layers, without the peer", runs["bf16"]["peak_rss_bytes"] / 1e9, "GB"),
    ]


def machine() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # that process has said why
        sys.exit(error.returncode)
