"""A model too small to say anything, for tests of what happens around a polish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.writer import create_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 2, 1, 8, 24, 32


def write_tiny_model(path: Path, *, layers: int = 2, arch: dict[str, Any] | None = None, **header: Any) -> Path:
    """A Llama-shaped model of random weights, without a tokenizer. `arch` and `header` add keys or replace them."""
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "mlp.gate_proj.weight": (FFN, HIDDEN),
            p + "mlp.up_proj.weight": (FFN, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    weights = {
        name: (draw.normal(size=shape) * 0.05 if len(shape) == 2 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    architecture = {
        "arch_name": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_layers": layers,
        "num_attention_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "layer_types": ["FullAttention"] * layers,
        "tie_word_embeddings": True,
        **(arch or {}),
    }
    create_model(
        path,
        header={"format": "cmf", "version": 2, "arch": architecture, "quant_type": "f32", **header},
        tensors=[(name, DType.F32, array.shape, lambda a=array: a) for name, array in weights.items()],
    )
    return path


def write_ids(path: Path, count: int, *, seed: int = 0) -> Path:
    """Token ids with some structure to learn: mostly the next number, now and then a random one."""
    draw = np.random.default_rng(seed)
    ids = np.where(draw.random(count) < 0.2, draw.integers(0, VOCAB, count), np.arange(count) % VOCAB)
    np.save(path, ids.astype(np.uint16))
    return path
