"""A model whose f32 weights are four times the memory budget, polished within the budget and without one.

    python benchmarks/bench_budget.py FOLDER [--layers 90] [--share 4] [--steps 3] [--json FILE]

Writes a HuggingFace directory of random weights into FOLDER, converts it, and runs both polishes as a user would. The
peak of memory is read from outside, from /proc, and both OUT are compared byte by byte. It takes 5 GB of disk, and the
run without a budget as much memory. A model that is there is used again.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, WIDTH, VOCAB, HEADS, GROUPS, HEAD_DIM = 1024, 2816, 8000, 16, 4, 64
POLL_S = 0.02
RECIPE = (
    "--o1 deep4 --o1-m 8 --o1-window 32 --seq 256 --batch 1 --no-gate --eval-every 0 --force --restart --device cpu"
    " --precision f32 --progress none"
)
RUN = [sys.executable, "-m", "cortiq_fcd"]
OUTER = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj.weight": (WIDTH, HIDDEN),
    "mlp.up_proj.weight": (WIDTH, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, WIDTH),
}


@dataclass(frozen=True)
class Ran:
    """One polish: from start to end, the median of its steps, and the most memory that it had at once."""

    seconds: float
    step_seconds: float
    peak_rss_bytes: int


def write_model(folder: Path, layers: int) -> None:
    """A Llama of random f16 weights, scaled so that activations stay of the order of 1; one file a layer."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float16)
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = (shape[1] * (2 * layers if adds else 1)) ** -0.5
        return (rng.standard_normal(shape, np.float32) * scale).astype(np.float16)

    parts = [OUTER, *({f"model.layers.{i}.{name}": shape for name, shape in LAYER.items()} for i in range(layers))]
    index: dict[str, str] = {}
    for number, shapes in enumerate(parts):
        file = f"model-{number:05d}.safetensors"
        save_file({name: drawn(name, shape) for name, shape in shapes.items()}, folder / file)
        index |= dict.fromkeys(shapes, file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def weight_bytes(layers: int) -> int:
    """All weights in f32."""
    numbers = [math.prod(shape) for shapes in (OUTER, *[LAYER] * layers) for shape in shapes.values()]
    return 4 * sum(numbers)


def furnish(folder: Path, layers: int) -> Path:
    """The converted model, and token ids of text and validation beside it."""
    model = folder / f"model-{layers}.cmf"
    if not model.exists():
        directory = folder / f"hf-{layers}"
        if not directory.exists():
            write_model(directory, layers)
        subprocess.run([*RUN, "convert", str(directory), str(model)], check=True)
    rng = np.random.default_rng(1)
    for name, count in {"train.npy": 20_000, "val.npy": 700}.items():
        np.save(folder / name, rng.integers(0, VOCAB, count))
    return model


def polish(model: Path, out: Path, steps: int, *more: str) -> Ran:
    """Polish in a process of its own, watched from here."""
    texts = ["--corpus", str(model.with_name("train.npy")), "--val-corpus", str(model.with_name("val.npy"))]
    command = [*RUN, "polish", str(model), str(out), *texts, *RECIPE.split(), "--steps", str(steps), *more]
    began, peak = time.perf_counter(), 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            peak = max(peak, _peak_rss_bytes(process.pid))
            time.sleep(POLL_S)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    seconds = time.perf_counter() - began
    report = json.loads(out.with_name(f"{out.name}.report.json").read_bytes())
    return Ran(seconds, float(np.median([loss["seconds"] for loss in report["losses"]])), peak)


def _peak_rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=90)
    parser.add_argument("--share", type=float, default=4.0, help="weights in f32, in budgets")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = furnish(args.folder, args.layers)
    weights = weight_bytes(args.layers)
    budget = int(weights / args.share)
    within = polish(model, args.folder / "within.cmf", args.steps, "--memory-budget", str(budget))
    without = polish(model, args.folder / "without.cmf", args.steps)
    same = filecmp.cmp(args.folder / "within.cmf", args.folder / "without.cmf", shallow=False)
    print(
        f"weights in f32 {weights / 1e9:.2f} GB, budget {budget / 1e9:.3f} GB, OUT {'the same' if same else 'DIFFERS'}"
    )
    for name, ran in {"within the budget": within, "without a budget": without}.items():
        told = f"peak {ran.peak_rss_bytes / 1e9:.3f} GB, a step {ran.step_seconds:.2f} s, all {ran.seconds:.1f} s"
        print(f"{name:18} {told}")
    print(
        f"ratio of a step {within.step_seconds / without.step_seconds:.2f},"
        f" of all {within.seconds / without.seconds:.2f}"
    )
    if args.json:
        told = {"weights_bytes": weights, "budget_bytes": budget, "same_bytes": same}
        args.json.write_text(json.dumps({**told, "within": asdict(within), "without": asdict(without)}, indent=2))


if __name__ == "__main__":
    main()
