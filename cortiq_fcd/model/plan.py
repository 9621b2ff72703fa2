"""What a model is made of, without touching a weight: the plan that the replica executes and `inspect` reads.

Every key of `arch` and every tensor is either consumed here, or listed as informational with the reason, or refused by
name; no torch is needed. A field that is merely unknown could change the function that the file describes, and a polish
of another function is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cortiq_fcd.errors import UnsupportedModelError

# Keys that do not change what the forward computes.
INFORMATIONAL_KEYS: Mapping[str, str] = {
    "arch_name": "a label",
    "max_position_embeddings": "a limit for callers; rotary angles need no table size",
    "intermediate_size": "FFN widths are read from the tensors' shapes, layer by layer",
}

# Keys that may be present as long as they ask for nothing; any other value is refused by name.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "embed_multiplier": (1, 1.0),
    "logit_multiplier": (1, 1.0),
    "num_loops": (1,),
    "loop_final_norm": (False,),
    "attn_v_norm": (False,),
    "yarn": ({},),
    "mla": ({},),
    "mtp": ({},),
    "moe": ({},),
    "g3n": ({},),
    "linear_core": ({},),
    "attention_heads_per_layer": ([],),
    "rope_freq_factors": ([],),
    "head_clusters": ([], {}),
}


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSource(Protocol):
    """The part of `cortiq_fcd.io.reader.CmfModel` that a plan reads."""

    header: dict[str, Any]
    required_features: int

    @property
    def tensors(self) -> Mapping[str, _Shaped]:
        """Name to something that has a shape."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer. Names are None where the model has no such tensor; shapes are [out, in]."""

    index: int
    ffn_size: int
    input_norm: str
    post_norm: str
    q_proj: str
    k_proj: str
    v_proj: str
    o_proj: str
    q_bias: str | None
    k_bias: str | None
    v_bias: str | None
    o_bias: str | None
    q_norm: str | None
    k_norm: str | None
    gate_proj: str
    up_proj: str
    down_proj: str

    @property
    def trainable(self) -> tuple[str, str, str, str, str]:
        """Names of the tensors that a polish may train, in the order of the recipe."""
        return (self.input_norm, self.post_norm, self.gate_proj, self.up_proj, self.down_proj)


@dataclass(frozen=True)
class ModelPlan:
    """A dense decoder-only transformer: dimensions (house letters), tensor names, the shape of every tensor used."""

    arch_name: str
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    norm_plus_one: bool
    rope_theta: float
    rotary_dim: int
    layers: tuple[LayerPlan, ...]
    embed: str
    final_norm: str
    head: str
    eos_ids: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.head == self.embed

    @property
    def params(self) -> int:
        """Number of weights that the forward uses."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class _Arch:
    """`header.arch`, remembering which keys were consumed."""

    def __init__(self, arch: Mapping[str, Any]) -> None:
        self._left = {key: value for key, value in arch.items() if value is not None}

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None or type(value) is not kind:
            raise UnsupportedModelError(f"arch.{key}", f"expected {kind.__name__}, got {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value: int = self.take(key, int, default)
        if value < 1:
            raise UnsupportedModelError(f"arch.{key}", f"expected a positive size, got {value}")
        return value

    def finish(self) -> None:
        for key, value in self._left.items():
            if key in INFORMATIONAL_KEYS:
                continue
            neutral = NEUTRAL_VALUES.get(key)
            if neutral is None:
                raise UnsupportedModelError(
                    f"arch.{key}", f"not supported (value {value!r}), and leaving it out would compute another model"
                )
            if not any(type(value) is type(n) and value == n for n in neutral):
                raise UnsupportedModelError(f"arch.{key}", f"only {neutral[0]!r} is supported, got {value!r}")


class _Tensors:
    """The tensor directory, remembering which tensors were consumed, with which shape."""

    def __init__(self, tensors: Mapping[str, _Shaped]) -> None:
        self._tensors = tensors
        self.used: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> str:
        if name not in self._tensors:
            raise UnsupportedModelError(
                name, f"the model needs this tensor (shape {list(shape)}) and the file has none"
            )
        got = tuple(self._tensors[name].shape)
        if got != shape:
            raise UnsupportedModelError(name, f"expected shape {list(shape)}, got {list(got)}")
        self.used[name] = got
        return name

    def maybe(self, name: str, *shape: int) -> str | None:
        return self.take(name, *shape) if self.has(name) else None

    def rows(self, name: str) -> int:
        """First dimension of a matrix, for sizes that only the shape tells."""
        return self._tensors[name].shape[0] if self.has(name) and self._tensors[name].shape else 0

    def finish(self) -> None:
        for name in self._tensors:
            if name in self.used or name.startswith("skill."):
                continue
            raise UnsupportedModelError(
                name, "a tensor that this forward does not use; leaving it out would compute another model"
            )


def plan_model(source: TensorSource) -> ModelPlan:
    """Plan the forward of a CMF model.

    Raises UnsupportedModelError (exit 4) naming the first key or tensor that is missing, has the wrong form, or would
    not be used by the forward.
    """
    if source.required_features & (1 << 6):
        raise UnsupportedModelError("required_features bit 6", "a standalone skill file holds only part of a model")
    arch = _Arch(source.header.get("arch") or {})
    tensors = _Tensors(source.tensors)
    C = arch.size("hidden_size")
    H = arch.size("num_attention_heads")
    G = arch.size("num_kv_heads", H)
    D = arch.size("head_dim", max(1, C // H))
    V = arch.size("vocab_size")
    layer_count = arch.size("num_layers")
    if H % G:
        raise UnsupportedModelError("arch.num_kv_heads", f"{H} query heads can't be shared by {G} kv heads")
    _check_layer_types(arch.take("layer_types", list), layer_count)
    norm_style = arch.take("norm_style", str, "qwen")
    if norm_style not in ("qwen", "gemma"):
        raise UnsupportedModelError("arch.norm_style", f"expected 'qwen' or 'gemma', got {norm_style!r}")
    tied = arch.take("tie_word_embeddings", bool, False)
    eps = arch.take("rms_norm_eps", float, 1e-6)
    theta = arch.take("rope_theta", float, 10000.0)
    rotary_dim = _rotary_dim(D, arch.take("partial_rotary_factor", float, 1.0))
    for key, value in (("rms_norm_eps", eps), ("rope_theta", theta)):
        if not (math.isfinite(value) and value > 0):
            raise UnsupportedModelError(f"arch.{key}", f"expected a positive number, got {value!r}")
    arch.finish()

    embed = tensors.take("model.embed_tokens.weight", V, C)
    layers = tuple(_plan_layer(tensors, i, C, H, G, D) for i in range(layer_count))
    final_norm = tensors.take("model.norm.weight", C)
    head = embed if tied else tensors.take("lm_head.weight", V, C)
    tensors.finish()
    return ModelPlan(
        arch_name=str((source.header.get("arch") or {}).get("arch_name") or "unknown"),
        hidden_size=C,
        heads=H,
        kv_heads=G,
        head_dim=D,
        vocab_size=V,
        norm_eps=eps,
        norm_plus_one=norm_style == "gemma",
        rope_theta=theta,
        rotary_dim=rotary_dim,
        layers=layers,
        embed=embed,
        final_norm=final_norm,
        head=head,
        eos_ids=_eos_ids(source.header),
        shapes=tensors.used,
    )


def _check_layer_types(layer_types: list[Any], layer_count: int) -> None:
    if len(layer_types) != layer_count:
        raise UnsupportedModelError("arch.layer_types", f"expected {layer_count} entries, got {len(layer_types)}")
    for i, kind in enumerate(layer_types):
        if kind != "FullAttention":
            raise UnsupportedModelError(f"arch.layer_types[{i}]", f"only 'FullAttention' is supported, got {kind!r}")


def _rotary_dim(head_dim: int, factor: float) -> int:
    rotary = max(2, math.floor(head_dim * factor)) if math.isfinite(factor) else 0
    if factor <= 0 or rotary % 2 or not 2 <= rotary <= head_dim:
        raise UnsupportedModelError(
            "arch.partial_rotary_factor",
            f"{factor!r} of head_dim {head_dim} rotates {rotary} dimensions; an even number up to head_dim is needed",
        )
    return rotary


def _plan_layer(tensors: _Tensors, index: int, C: int, H: int, G: int, D: int) -> LayerPlan:
    layer = f"model.layers.{index}."
    attn, mlp = layer + "self_attn.", layer + "mlp."
    F = tensors.rows(mlp + "gate_proj.weight")
    if F < 1:
        raise UnsupportedModelError(mlp + "gate_proj.weight", "the layer has no dense FFN of the gate/up/down kind")
    return LayerPlan(
        index=index,
        ffn_size=F,
        input_norm=tensors.take(layer + "input_layernorm.weight", C),
        post_norm=tensors.take(layer + "post_attention_layernorm.weight", C),
        q_proj=tensors.take(attn + "q_proj.weight", H * D, C),
        k_proj=tensors.take(attn + "k_proj.weight", G * D, C),
        v_proj=tensors.take(attn + "v_proj.weight", G * D, C),
        o_proj=tensors.take(attn + "o_proj.weight", C, H * D),
        q_bias=tensors.maybe(attn + "q_proj.bias", H * D),
        k_bias=tensors.maybe(attn + "k_proj.bias", G * D),
        v_bias=tensors.maybe(attn + "v_proj.bias", G * D),
        o_bias=tensors.maybe(attn + "o_proj.bias", C),
        q_norm=tensors.maybe(attn + "q_norm.weight", D),
        k_norm=tensors.maybe(attn + "k_norm.weight", D),
        gate_proj=tensors.take(mlp + "gate_proj.weight", F, C),
        up_proj=tensors.take(mlp + "up_proj.weight", F, C),
        down_proj=tensors.take(mlp + "down_proj.weight", C, F),
    )


def _eos_ids(header: Mapping[str, Any]) -> tuple[int, ...]:
    config = header.get("tokenizer_config")
    ids = config.get("eos_token_ids") if isinstance(config, dict) else None
    return tuple(i for i in ids if type(i) is int) if isinstance(ids, list) else ()
