"""Tiny random models, a tiny tokenizer and text for it, and where the reference data lies. One torch thread for all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import tokenizers
import torch
from tokenizers import Regex, models, pre_tokenizers
from torch import Tensor

from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.writer import create_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import ModelPlan, plan_model
from cortiq_fcd.model.replica import Replica, new_replica
from cortiq_fcd.model.weights import FrozenWeights, filled_by, load_weights

torch.set_num_threads(1)
# The same examples in every run, and no limit on the time of one: the machine may be busy.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
NO_GOLDEN = f"no reference data at {GOLDEN}"

ALPHABET = " .abcdefghijklmnopqrstuvwxyz\n"
Arrays = dict[str, np.ndarray]
LINEAR_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
LINEAR: dict[str, Any] = {
    "linear_core": {"kind": "gated_delta_net", "num_heads": 4, "value_head_dim": 5},
    **{f"linear_{key}": size for key, size in zip(LINEAR_SIZES, (2, 4, 6, 5, 3), strict=True)},
}


@dataclass(frozen=True)
class Tiny:
    """A random model: sizes by the house's letters, and which of the optional tensors it has."""

    C: int = 16
    H: int = 4
    G: int = 2
    D: int = 8
    F: int = 24
    V: int = len(ALPHABET)
    layers: int = 3
    tied: bool = True
    qk_norm: bool = True
    biases: str = ""  # of q, k, v, o
    gate: str = ""  # interleaved, head or channel
    padding: int = 0  # rows of the embedding past the vocabulary
    arch: Mapping[str, Any] = field(default_factory=dict)  # further keys
    seed: int = 0

    def header(self) -> dict[str, Any]:
        arch = {
            "arch_name": "tiny",
            "hidden_size": self.C,
            "intermediate_size": self.F,
            "num_layers": self.layers,
            "num_attention_heads": self.H,
            "num_kv_heads": self.G,
            "head_dim": self.D,
            "vocab_size": self.V,
            "layer_types": ["FullAttention"] * self.layers,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            **self.arch,
        }
        return {"format": "cmf", "version": 2, "arch": arch, "quant_type": "f32"}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        arch = self.header()["arch"]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.V + self.padding, self.C)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (self.C,)
            shapes[layer + "post_attention_layernorm.weight"] = (self.C,)
            if arch["layer_types"][i] == "LinearAttention":
                shapes |= self._linear_attention(layer + "linear_attn.")
            else:
                shapes |= self._attention(layer + "self_attn.", arch.get("attention_heads_per_layer", {i: self.H})[i])
            shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (self.F, self.C)
            shapes[layer + "mlp.down_proj.weight"] = (self.C, self.F)
        shapes["model.norm.weight"] = (self.C,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.V + self.padding, self.C)
        return shapes

    def _attention(self, name: str, H: int) -> dict[str, tuple[int, ...]]:
        q_rows = H * self.D * (2 if self.gate == "interleaved" else 1)
        rows = {"q": q_rows, "k": self.G * self.D, "v": self.G * self.D, "o": self.C}
        if self.gate in ("head", "channel"):
            rows["g"] = H if self.gate == "head" else H * self.D
        shapes: dict[str, tuple[int, ...]] = {}
        for part, out in rows.items():
            shapes[f"{name}{part}_proj.weight"] = (out, H * self.D if part == "o" else self.C)
            if part in self.biases:
                shapes[f"{name}{part}_proj.bias"] = (out,)
        if self.qk_norm:
            shapes[name + "q_norm.weight"] = shapes[name + "k_norm.weight"] = (self.D,)
        return shapes

    def _linear_attention(self, name: str) -> dict[str, tuple[int, ...]]:
        nk, nv, dk, dv, taps = (LINEAR[f"linear_{key}"] for key in LINEAR_SIZES)
        channels = 2 * nk * dk + nv * dv
        rows = {"qkv": channels, "z": nv * dv, "a": nv, "b": nv}
        shapes: dict[str, tuple[int, ...]] = {f"{name}in_proj_{part}.weight": (n, self.C) for part, n in rows.items()}
        shapes |= {name + "conv1d.weight": (channels, 1, taps), name + "A_log": (nv,), name + "dt_bias": (nv,)}
        return shapes | {name + "norm.weight": (dv,), name + "out_proj.weight": (self.C, nv * dv)}

    def arrays(self) -> Arrays:
        """Weights of about the size that a trained model has: gains near 1, products that keep the variance."""
        rng = np.random.default_rng(self.seed)
        plus_one = self.arch.get("norm_style") == "gemma"
        arrays = {}
        for name, shape in self.shapes().items():
            values = rng.standard_normal(shape)
            if "norm" in name:
                # The norm inside linear attention is plain in both styles.
                values = 0.2 * values + (0 if plus_one and "linear_attn" not in name else 1)
            elif len(shape) == 1:
                values *= 0.3
            else:
                values /= np.sqrt(shape[-1]) * (1 if "embed" in name or "lm_head" in name else 0.8)
            arrays[name] = values.astype(np.float32)
        return arrays

    def plan(self) -> ModelPlan:
        return plan_model(Source(self.header(), {name: Shape(shape) for name, shape in self.shapes().items()}))

    def weights(self) -> FrozenWeights:
        arrays = self.arrays()
        return load_weights(self.plan(), filled_by(lambda name: torch.from_numpy(arrays[name])), torch.device("cpu"))

    def replica(self, conversion: Conversion) -> Replica:
        return new_replica(self.weights(), conversion)

    def write(self, path: Path, *, dtype: DType = DType.F32, tokenizer: bytes | None = None, **header: Any) -> Path:
        """The model as a file: matrices as `dtype`, vectors f32, further header keys at the end."""
        return write_arrays(path, self.header() | header, self.arrays(), dtype=dtype, tokenizer=tokenizer)


@dataclass(frozen=True)
class Shape:
    """What a plan sees of a tensor."""

    shape: tuple[int, ...]


@dataclass
class Source:
    """What a plan sees of a file."""

    header: dict[str, Any]
    tensors: dict[str, Shape]
    required_features: int = 1


def write_arrays(
    path: Path,
    header: dict[str, Any],
    arrays: Arrays,
    *,
    dtype: DType = DType.F32,
    tokenizer: bytes | None = None,
    **options: Any,
) -> Path:
    """Arrays as a model file: matrices as `dtype`, vectors f32 (NaN and Inf too). `options` go to `create_model`."""

    def tensor(name: str, array: np.ndarray) -> tuple[str, DType, tuple[int, ...], Callable[[], np.ndarray]]:
        stored = DType.F32 if array.ndim == 1 else dtype
        raw = np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8)
        return name, stored, array.shape, lambda: raw if stored is DType.F32 else array

    create_model(path, header=header, tensors=[tensor(*item) for item in arrays.items()], vocab=tokenizer, **options)
    return path


def tiny_tokenizer() -> bytes:
    """A tokenizer.json with one id a character of ALPHABET."""
    codec = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=" "))
    codec.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return codec.to_str().encode()


def tiny_text(characters: int, seed: int = 0) -> str:
    """Sentences over a dozen words: enough order for a tiny model to learn something in a few steps."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "bird", "fly", "by"]
    rng = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += " ".join(rng.choice(words) for _ in range(6)) + ".\n"
    return text[:characters]


def in_f64(weights: FrozenWeights) -> FrozenWeights:
    """The same weights in f64; what is one tensor stays one tensor."""
    doubles: dict[int, Tensor] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return doubles.setdefault(id(value), value.double() if value.is_floating_point() else value)
        if isinstance(value, tuple):
            return tuple(converted(item) for item in value)
        if is_dataclass(value):
            return replace(value, **{f.name: converted(getattr(value, f.name)) for f in fields(value)})
        return value

    result: FrozenWeights = converted(weights)
    return result


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a tree of dataclasses and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if is_dataclass(value):
        return [tensor for f in fields(value) for tensor in tensors_in(getattr(value, f.name))]
    return []


def golden_json(name: str) -> dict[str, Any]:
    """A JSON file of the reference data."""
    record: dict[str, Any] = json.loads((GOLDEN / name).read_text("utf-8"))
    return record


def exact_replica(plan: ModelPlan, load: Callable[[str], Tensor]) -> Replica:
    """A model that runs exact attention alone, from its tensors by name."""
    weights = load_weights(plan, filled_by(load), torch.device("cpu"))
    return new_replica(weights, Conversion((0,), (0,), 4, 1, 0, 1, polish_only=True))
