"""Small HuggingFace directories, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

Arrays = dict[str, np.ndarray]


def llama_arrays(config: Mapping[str, Any] = LLAMA, dtype: str = "float32", seed: int = 0) -> Arrays:
    """Random weights with transformers' names, the head only if it is not tied."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,), "model.embed_tokens.weight": (vocab, hidden)}
    for i in reversed(range(config["num_hidden_layers"])):  # files are in no particular order
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.1 + (1 if "norm" in name else 0)).astype(dtype)
        for name, shape in shapes.items()
    }


def write_directory(
    folder: Path,
    config: Mapping[str, Any] = LLAMA,
    arrays: Arrays | None = None,
    *,
    tokenizer: bytes | None = None,
    **files: Mapping[str, Any],
) -> Path:
    """A model directory; `files`: more JSON files by their name without ending."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(llama_arrays(config) if arrays is None else arrays, folder / "model.safetensors")
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder
