"""Directories that transformers wrote, converted: its logits are ours within 1e-3, and the export loads with the same.

Tiny random models, f32 on both sides.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortiq_fcd.cli import exits
from cortiq_fcd.io.hf.directory import open_directory
from cortiq_fcd.io.hf.exporting import plan_export
from cortiq_fcd.io.hf.importing import plan_import
from cortiq_fcd.io.hf.writing import write_export
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.tokenizer import load_tokenizer
from cortiq_fcd.model.plan import plan_model
from cortiq_fcd.model.replica import hidden_states
from tests.fixtures import exact_replica
from tests.io.small_hf_model import llama_arrays, write_directory
from tests.oracles import cmf_reader
from tests.tiny_model import write_ids

transformers = pytest.importorskip("transformers", "5.24", reason="the other implementation needs transformers 5.24")

LOGITS_ABSOLUTE = 1e-3
VOCAB = 50
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, **LINEAR}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

Config = dict[str, Any]


def older_spelling(config: Config) -> Config:
    """rope_theta beside rope_scaling, as transformers 4 wrote it, and nothing that has a default."""
    rope = dict(config.pop("rope_parameters"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if len(rope) > 1 else None
    return config


def silent(*keys: str) -> Callable[[Config], Config]:
    return lambda config: {key: value for key, value in config.items() if key not in keys}


@dataclass(frozen=True)
class Case:
    """A model of transformers by its class and config, and how its config.json is rewritten."""

    model: str
    config: Config = field(default_factory=dict)
    rewrite: Callable[[Config], Config] = lambda config: config
    kind: str = ""  # the family in CMF, where it isn't that of the class


CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", {"rope_theta": 500.0}),
    "llama with biases, older spelling": Case("LlamaForCausalLM", {"attention_bias": True}, older_spelling),
    "llama 3": Case("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama 3, older spelling": Case("LlamaForCausalLM", {"rope_parameters": LLAMA3}, older_spelling),
    "llama, linear scaling": Case(
        "LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}}
    ),
    "smollm": Case("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 8}, silent("head_dim")),
    "tied and silent about it": Case("LlamaForCausalLM", {"tie_word_embeddings": True}, silent("tie_word_embeddings")),
    "not tied and silent about it": Case("Qwen3ForCausalLM", {}, silent("tie_word_embeddings")),
    "mistral": Case("MistralForCausalLM", {"sliding_window": 7}),
    "mistral without a window": Case("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": Case("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, some layers slide": Case(
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        silent("layer_types"),
    ),
    "qwen3": Case("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3, yarn": Case("Qwen3ForCausalLM", {"rope_parameters": YARN}, older_spelling),
    "qwen3, yarn with a factor of its own": Case(
        "Qwen3ForCausalLM",
        {"rope_parameters": {**YARN, "attention_factor": 1.4, "beta_fast": 8.0, "truncate": False}},
    ),
    "qwen3-next": Case(
        "Qwen3NextForCausalLM", {**HYBRID, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3], "rope_theta": 30.0}
    ),
    "qwen3.5": Case("Qwen3_5ForCausalLM", {**HYBRID, "rope_theta": 30.0, "tie_word_embeddings": True}),
    "qwen3.5 with images": Case("Qwen3_5ForConditionalGeneration", {**HYBRID, "rope_theta": 30.0}),
}


def build(case: Case) -> torch.nn.Module:
    kind = getattr(transformers, case.model)
    config = {**BASE, **case.config}
    if "ConditionalGeneration" in case.model:
        settings = kind.config_class(text_config=config, vision_config=VISION)
    else:
        settings = kind.config_class(**config)
    settings._attn_implementation = "eager"
    torch.manual_seed(5)
    model = kind(settings).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if "norm" in name:
                weight.add_(0.3 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(
                    noise * (0.6 if "embed" in name or "lm_head" in name else 1.3 / math.sqrt(weight.shape[-1]))
                )
    return model


def their_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def our_logits(path: Path, ids: Tensor) -> Tensor:
    with open_model(path) as model:
        replica = exact_replica(plan_model(model), lambda name: torch.from_numpy(model.decode(name)))
    return (hidden_states(replica, ids, student=False) @ replica.weights.head.T).unflatten(0, ids.shape)


@pytest.mark.parametrize("name", CASES)
def test_both_ways(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    settings = tmp_path / "hf" / "config.json"
    settings.write_text(json.dumps(case.rewrite(json.loads(settings.read_text("utf-8")))), encoding="utf-8")
    ids = torch.randint(VOCAB, (2, 48), generator=torch.Generator().manual_seed(6))
    expected = their_logits(model, ids)
    assert 1 < expected.abs().max() < 60

    planned = plan_import(open_directory(tmp_path / "hf"), DType.F32)
    plan_model(planned)
    planned.write(tmp_path / "out.cmf", force=False)
    cmf_reader.read(tmp_path / "out.cmf")
    assert (our_logits(tmp_path / "out.cmf", ids) - expected).abs().max() < LOGITS_ABSOLUTE

    with open_model(tmp_path / "out.cmf") as converted:
        write_export(plan_export(converted, "f32"), tmp_path / "back", "f32", converted.header["tokenizer_config"])
        assert converted.header["tokenizer_config"]["eos_token_ids"] == [3]
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (their_logits(loaded.eval(), ids) - expected).abs().max() < LOGITS_ABSOLUTE


def test_polished_weights_are_used_elsewhere(tmp_path: Path) -> None:
    """convert --polish, export, and transformers: the logits of the polished file with exact attention."""
    write_directory(tmp_path / "hf")
    corpus = f"--corpus {write_ids(tmp_path / 'train.npy', 2000)} --val-corpus {write_ids(tmp_path / 'val.npy', 400)}"
    kernel = "--o1 all --o1-window 2 --o1-m 4 --o1-sink 0"
    recipe = "--seq 32 --steps 20 --batch 1 --lr 1e-3 --no-gate --threads 1 --progress none"
    before = signal.getsignal(signal.SIGTERM)
    for command in (
        f"convert {tmp_path / 'hf'} {tmp_path / 'out.cmf'} --polish {corpus} {kernel} {recipe}",
        f"export {tmp_path / 'out.cmf'} {tmp_path / 'back'}",
    ):
        assert exits.run(command.split()) == 0
    signal.signal(signal.SIGTERM, before)
    cmf_reader.read(tmp_path / "out.cmf")
    ids = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(6))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert (their_logits(loaded, ids) - our_logits(tmp_path / "out.cmf", ids)).abs().max() < LOGITS_ABSOLUTE
    name = "model.layers.1.mlp.up_proj.weight"
    with open_model(tmp_path / "out.cmf") as polished:
        change = np.abs(polished.decode(name) - llama_arrays()[name]).max()
    assert change > 2e-3  # trained, so that there was something to keep


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    data = Path(__file__).resolve().parents[1] / "cortiq_fcd" / "data"
    assert exits.run(["export", str(data / "demo.cmf"), str(tmp_path / "demo")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "demo")
    with open_model(data / "demo.cmf") as model:
        ours = load_tokenizer(model)
    text = (data / "austen.txt").read_text("utf-8")[:50_000] + "  \t naïve\u3000文字 123<|endoftext|>"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert theirs.eos_token_id == 0
