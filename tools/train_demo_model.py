"""Trains the built-in demo model from nothing: a byte-level BPE tokenizer, then a small Qwen3-shaped transformer.

    python tools/train_demo_model.py NOVELS_DIR OUT_DIR

NOVELS_DIR is what `make_corpus.py` reads. Both learn from five novels only; Persuasion is never seen. OUT_DIR gets a
small HuggingFace directory (config.json, tokenizer.json, model.safetensors) that `cortiq convert` turns into the .cmf.

Ordinary torch.autograd on the CPU, one thread, everything drawn from one seed: the same machine and torch version give
the same bytes. Two phases (PHASES): short windows, in some of which a passage comes back, so that keys far back matter;
then long windows, in some of which a phrase is stuck in a loop that the model must not carry on: small models loop in
greedy decoding even with exact attention, and the generation gate is worth showing only where they don't.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from make_corpus import HELD_OUT_NOVEL, TRAIN_NOVELS, novel_text
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

TOKENS = 4096  # in a step
EVAL_SEQ = 512
EOS = "<|endoftext|>"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Phase:
    """Steps of one kind. The learning rate falls along a cosine that reaches its end after `horizon` steps."""

    steps: int
    horizon: int
    warmup: int
    lr: float
    seq: int
    repeat: float  # share of the windows in which a passage comes back
    loop: float  # share of the windows in which a phrase loops

    def learning_rate(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.horizon))
        return self.lr * min(1.0, step / self.warmup) * (0.01 + 0.99 * cosine)


PHASES = (
    Phase(steps=1400, horizon=3600, warmup=100, lr=8e-3, seq=256, repeat=0.25, loop=0.0),
    Phase(steps=300, horizon=300, warmup=20, lr=4e-3, seq=512, repeat=0.0, loop=0.25),
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # every byte, so that any text can be encoded
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def init_weights(generator: torch.Generator) -> dict[str, Tensor]:
    """Names and shapes of HuggingFace's Qwen3; normal(0, 0.02), the writers into the residual stream scaled down."""
    c, hidden, ffn = CONFIG, CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q_rows, kv_rows = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    weights = {}

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0) -> None:
        weights[name] = torch.randn(rows, cols, generator=generator) * 0.02 * scale

    matrix("model.embed_tokens.weight", c["vocab_size"], hidden)
    residual = 1 / math.sqrt(2 * c["num_hidden_layers"])
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        weights[p + "input_layernorm.weight"] = torch.ones(hidden)
        matrix(p + "self_attn.q_proj.weight", q_rows, hidden)
        matrix(p + "self_attn.k_proj.weight", kv_rows, hidden)
        matrix(p + "self_attn.v_proj.weight", kv_rows, hidden)
        matrix(p + "self_attn.o_proj.weight", hidden, q_rows, residual)
        weights[p + "self_attn.q_norm.weight"] = torch.ones(c["head_dim"])
        weights[p + "self_attn.k_norm.weight"] = torch.ones(c["head_dim"])
        weights[p + "post_attention_layernorm.weight"] = torch.ones(hidden)
        matrix(p + "mlp.gate_proj.weight", ffn, hidden)
        matrix(p + "mlp.up_proj.weight", ffn, hidden)
        matrix(p + "mlp.down_proj.weight", hidden, ffn, residual)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _Bf16Linear(torch.autograd.Function):
    """x W^T with bf16 products: half again as fast on CPUs that have them, the sums and everything else stay f32."""

    @staticmethod
    def forward(ctx, x, w):
        x, w = x.bfloat16(), w.bfloat16()
        ctx.save_for_backward(x, w)
        return (x @ w.T).float()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.bfloat16()
        return (dy @ w).float(), (dy.flatten(0, -2).T @ x.flatten(0, -2)).float()


def logits(weights: dict[str, Tensor], ids: Tensor, attention=exact_attention, linear=F.linear) -> Tensor:
    """[B, T] ids -> [B, T, V]. `attention` takes q [B, H, T, D], k and v [B, G, T, D]."""
    batch, length = ids.shape
    dim, eps = CONFIG["head_dim"], CONFIG["rms_norm_eps"]
    frequency = CONFIG["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], eps)

    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{i}."
        n = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            linear(n, weights[f"{p}self_attn.{name}_proj.weight"]).view(batch, length, -1, dim) for name in "qkv"
        )
        q = rotate(norm(q, p + "self_attn.q_norm.weight").transpose(1, 2), cos, sin)
        k = rotate(norm(k, p + "self_attn.k_norm.weight").transpose(1, 2), cos, sin)
        out = attention(q, k, v.transpose(1, 2)).transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(out, weights[p + "self_attn.o_proj.weight"])
        n = norm(x, p + "post_attention_layernorm.weight")
        gate = F.silu(linear(n, weights[p + "mlp.gate_proj.weight"]))
        up = linear(n, weights[p + "mlp.up_proj.weight"])
        x = x + linear(gate * up, weights[p + "mlp.down_proj.weight"])
    return linear(norm(x, "model.norm.weight"), weights["model.embed_tokens.weight"])


def sample_rows(ids: Tensor, batch: int, seq: int, repeat: float, generator: torch.Generator) -> Tensor:
    """[batch, seq + 1] ids; in that share of the rows a passage comes back after a gap of other text."""
    starts = torch.randint(len(ids) - seq - 1, (batch,), generator=generator).tolist()
    rows = torch.stack([ids[s : s + seq + 1] for s in starts])
    for row in rows[: round(batch * repeat)]:
        length = int(torch.randint(seq // 8, seq // 3, (1,), generator=generator))
        source = int(torch.randint(seq + 1 - 2 * length, (1,), generator=generator))
        target = int(torch.randint(source + length, seq + 2 - length, (1,), generator=generator))
        row[target : target + length] = row[source : source + length].clone()
    return rows


def add_loops(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows with a phrase of 4 to 24 tokens said again and again before the text goes on, and masks of these targets.

    masks [2, B, T + 1] bool: what is not learned (all copies), and what is to be made unlikely (the copies but for
    their first three tokens: until then nothing tells a loop from chance).
    """
    masks = torch.zeros(2, *rows.shape, dtype=torch.bool)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    for i, row in enumerate(rows):
        period = draw(4, 25)
        length = min(period * draw(1, 8), len(row) // 2)
        start = draw(period, len(row) - length)
        phrase = row[start - period : start].repeat(8)[:length]
        row[start + length :] = row[start:-length].clone()
        row[start : start + length] = phrase
        masks[0, i, start : start + length] = True
        masks[1, i, start + 3 : start + length] = True
    return rows, masks


def loss_of(weights: dict[str, Tensor], rows: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy, and the unlikelihood -log(1 - p) of what carries a loop on (Welleck et al. 2020)."""
    log_p = logits(weights, rows[:, :-1], linear=_Bf16Linear.apply).log_softmax(-1)
    log_p = log_p.gather(-1, rows[:, 1:, None])[..., 0]
    skipped, unlikely = masks[:, :, 1:]
    doubt = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    return (torch.where(skipped, 0.0, -log_p) + torch.where(unlikely, doubt, 0.0)).mean()


@torch.no_grad()
def perplexity(weights: dict[str, Tensor], ids: Tensor, windows: int, seq: int) -> float:
    stride = (len(ids) - seq - 1) // windows
    rows = torch.stack([ids[i * stride : i * stride + seq + 1] for i in range(windows)])
    nll = [F.cross_entropy(logits(weights, r[:, :-1]).flatten(0, 1), r[:, 1:].flatten()) for r in rows.split(4)]
    return math.exp(sum(float(x) for x in nll) / len(nll))


def save(weights: dict[str, Tensor], path: Path) -> None:
    rounded = {n: t.detach().half() if t.ndim == 2 else t.detach() for n, t in weights.items()}
    save_file(rounded, path, metadata={"format": "pt"})


def train(weights: dict[str, Tensor], train_ids: Tensor, val_ids: Tensor, phase: Phase, seed: int, path: Path) -> None:
    """Muon for the layers' matrices, AdamW for embedding and gains. Saves to `path` every 100 steps."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor.requires_grad_()
    embedding = weights["model.embed_tokens.weight"]
    matrices = [t for t in weights.values() if t.ndim == 2 and t is not embedding]
    gains = [t for t in weights.values() if t.ndim == 1]
    adamw = torch.optim.AdamW([embedding, *gains], betas=(0.9, 0.98), weight_decay=0.0)
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    began = time.monotonic()
    batch = TOKENS // phase.seq
    looping = round(batch * phase.loop)
    for step in range(1, phase.steps + 1):
        for group in (*adamw.param_groups, *muon.param_groups):
            group["lr"] = phase.learning_rate(step)
        rows = sample_rows(train_ids, batch, phase.seq, phase.repeat, generator)
        masks = torch.zeros(2, *rows.shape, dtype=torch.bool)
        if looping:
            rows[:looping], masks[:, :looping] = add_loops(rows[:looping], generator)
        loss = loss_of(weights, rows, masks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for optimizer in (adamw, muon):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == phase.steps:
            seen, unseen = (perplexity(weights, ids, 24, EVAL_SEQ) for ids in (train_ids, val_ids))
            clock = time.monotonic() - began
            print(f"step {step} loss {loss.item():.4f} seen {seen:.2f} unseen {unseen:.2f} {clock:.0f} s", flush=True)
            save(weights, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("novels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--phases", type=int, nargs="+", default=[1, 2], help="2 alone goes on from OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)

    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    texts = [novel_text(args.novels, name) for name in TRAIN_NOVELS]
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    encoded = [[*tokenizer.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    train_ids = torch.tensor(np.concatenate(encoded), dtype=torch.int64)
    held_out = novel_text(args.novels, HELD_OUT_NOVEL)
    val_ids = torch.tensor(tokenizer.encode(held_out, add_special_tokens=False).ids, dtype=torch.int64)
    print(f"{len(train_ids)} training tokens, {len(val_ids)} held out", flush=True)

    path = args.out / "model.safetensors"
    for number in args.phases:
        # Phase 2 starts from the file, whose matrices are f16: alone it is the same as after phase 1 in one run.
        if number == 1:
            weights = init_weights(torch.Generator().manual_seed(args.seed))
        else:
            weights = {name: tensor.float() for name, tensor in load_file(path).items()}
        print(f"phase {number}: {sum(t.numel() for t in weights.values())} parameters", flush=True)
        train(weights, train_ids, val_ids, PHASES[number - 1], args.seed + number - 1, path)


if __name__ == "__main__":
    main()
