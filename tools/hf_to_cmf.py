"""Writes a HuggingFace directory of a dense Llama, Qwen2 or Qwen3 model as one .cmf file.

    python tools/hf_to_cmf.py HF_DIR OUT.cmf [--o1 '{"layers": "all", "m": 32, "w": 128, "sink": 4}']

16-bit tensors keep their bits; f32 matrices become f16, f32 vectors stay f32. tokenizer.json goes in as it is.
--o1 marks the file as converted: the runtime, and a polish without flags of its own, take that setting.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.writer import create_model

MODEL_TYPES = ("llama", "qwen2", "qwen3")
DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def refuse_what_is_not_written(config: dict[str, Any]) -> None:
    """Anything that would make the file another model than the directory."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {
        "model_type": config.get("model_type") not in MODEL_TYPES,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    refused = [f"{key} = {config.get(key)!r}" for key, wrong in found.items() if wrong]
    if refused:
        raise SystemExit(f"not supported: {', '.join(refused)} (dense {', '.join(MODEL_TYPES)} models only)")


def arch(config: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    return {
        "arch_name": config["model_type"],
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": config["vocab_size"],
        "layer_types": ["FullAttention"] * config["num_hidden_layers"],
        "rms_norm_eps": config["rms_norm_eps"],
        "norm_style": "qwen",
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": config["max_position_embeddings"],
    }


def tokenizer_config(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    eos = read_json(directory / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    found = {
        "chat_template": read_json(directory / "tokenizer_config.json").get("chat_template"),
        "eos_token_ids": [eos] if isinstance(eos, int) else eos or [],
        "bos_token_id": config.get("bos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
    }
    return {key: value for key, value in found.items() if value is not None}


def tensors(directory: Path, tied: bool) -> Iterator[tuple[str, DType, tuple[int, ...], Callable[[], np.ndarray]]]:
    def produce(path: Path, name: str) -> np.ndarray:
        with safe_open(path, framework="pt") as stream:
            return stream.get_tensor(name).float().numpy()

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stream:
            names = list(stream.keys())
            found = {name: (stream.get_tensor(name).dtype, tuple(stream.get_slice(name).get_shape())) for name in names}
        for name, (dtype, shape) in found.items():
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue
            wide = DType.F32 if len(shape) == 1 else DType.F16
            yield name, DTYPES.get(dtype, wide), shape, partial(produce, path, name)


def main() -> None:
    parser = argparse.ArgumentParser(description="write a HuggingFace directory as a .cmf file")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--o1", type=json.loads, help="provenance.o1_attn, as JSON")
    args = parser.parse_args()

    config = read_json(args.directory / "config.json")
    refuse_what_is_not_written(config)
    header = {"format": "cmf", "version": 2, "arch": arch(config), "quant_type": "F16"}
    if args.o1:
        header["provenance"] = {"o1_attn": args.o1}
    header["tokenizer_config"] = tokenizer_config(args.directory, config)
    vocab = (args.directory / "tokenizer.json").read_bytes()
    plan = tensors(args.directory, header["arch"]["tie_word_embeddings"])
    written = create_model(args.out, header=header, tensors=plan, vocab=vocab, force=True)
    print(f"{written.path}: {written.bytes} bytes, {written.tensors_written} tensors, dir_hash {written.dir_hash}")


if __name__ == "__main__":
    main()
