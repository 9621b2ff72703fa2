"""What a model is made of, without touching a weight: the plan that the replica executes and `inspect` reads.

Every key of `arch` and every tensor is either consumed here, or listed as informational with the reason, or refused by
name; no torch is needed. A field that is merely unknown could change the function that the file describes, and a polish
of another function is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.model.consumed import Keys, Shaped, Tensors
from cortiq_fcd.model.rotary import RotaryPlan, plan_rotary

STANDALONE_SKILL_BIT = 1 << 6
# Far beyond any model: a header alone must not cost memory (angles are planned before shapes are compared).
MOST_HEAD_DIM = 1 << 16
MOST_LOOPS = 1 << 10


class TensorSource(Protocol):
    """The part of `cortiq_fcd.io.reader.CmfModel` that a plan reads."""

    header: dict[str, Any]
    required_features: int

    @property
    def tensors(self) -> Mapping[str, Shaped]:
        """Name to something that has a shape."""


@dataclass(frozen=True)
class NormPlan:
    """RMSNorm: the gain is the weight, or 1 + weight."""

    eps: float
    plus_one: bool


@dataclass(frozen=True)
class AttentionPlan:
    """Softmax attention: H query heads share G kv heads of size D. `window` and `softcap` are null where there is none.

    gate: `interleaved` (q_proj holds [q; gate] per head), `projection` (g_proj, one gate a head or a channel), or null.
    Names are null where the model has no such tensor.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rotary: RotaryPlan
    gate: Literal["interleaved", "projection"] | None
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
    g_proj: str | None

    @property
    def obstacle(self) -> str:
        """Why the layer can't be converted to the O(1) kernel; empty if it can."""
        if self.window is not None:
            return "it is sliding-window attention"
        return "its logits are soft-capped" if self.softcap is not None else ""


@dataclass(frozen=True)
class DeltaNetPlan:
    """GatedDeltaNet: R = value_heads / key_heads value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    conv_shape: tuple[int, ...]
    in_proj: tuple[str, str, str, str]  # qkv, z, a, b
    conv: str
    A_log: str
    dt_bias: str
    norm: str
    out_proj: str
    obstacle: str = "it is linear attention already"


MixerPlan: TypeAlias = AttentionPlan | DeltaNetPlan


@dataclass(frozen=True)
class LayerPlan:
    """One layer: a mixer over time and a gated feed-forward block of width ffn_size."""

    index: int
    mixer: MixerPlan
    ffn_size: int
    input_norm: str
    post_norm: str
    gate_proj: str
    up_proj: str
    down_proj: str

    @property
    def trainable(self) -> tuple[str, str, str, str, str]:
        """Names of the tensors that a polish may train, in the order of the recipe."""
        return (self.input_norm, self.post_norm, self.gate_proj, self.up_proj, self.down_proj)


@dataclass(frozen=True)
class ModelPlan:
    """A dense decoder-only model. `shapes` has every tensor that the forward uses.

    Embeddings are multiplied by embed_multiplier, logits by logit_multiplier and then soft-capped. The layers run
    num_loops times, with the final norm in between when loop_norm is set.
    """

    arch_name: str
    hidden_size: int
    vocab_size: int
    norm: NormPlan
    layers: tuple[LayerPlan, ...]
    embed: str
    final_norm: str
    head: str
    embed_multiplier: float
    logit_multiplier: float
    logit_softcap: float | None
    num_loops: int
    loop_norm: bool
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


def plan_model(source: TensorSource) -> ModelPlan:
    """Plan the forward of a CMF model.

    Raises UnsupportedModelError (exit 4) naming the first key or tensor that is missing, has the wrong form, or would
    not be used by the forward.
    """
    if source.required_features & STANDALONE_SKILL_BIT:
        raise UnsupportedModelError("required_features bit 6", "a standalone skill file holds only part of a model")
    arch = Keys(source.header.get("arch") or {}, "arch")
    tensors = Tensors(source.tensors)
    hidden, vocab = arch.size("hidden_size"), arch.size("vocab_size")
    norm_style = arch.take("norm_style", str, "qwen")
    if norm_style not in ("qwen", "gemma"):
        raise UnsupportedModelError("arch.norm_style", f"expected 'qwen' or 'gemma', got {norm_style!r}")
    tied = arch.take("tie_word_embeddings", bool, False)
    embed_rows = max(vocab, (tensors.shape("model.embed_tokens.weight") or (vocab,))[0])
    embed = tensors.take("model.embed_tokens.weight", embed_rows, hidden)
    plan = ModelPlan(
        arch_name=str((source.header.get("arch") or {}).get("arch_name") or "unknown"),
        hidden_size=hidden,
        vocab_size=vocab,
        norm=NormPlan(arch.positive("rms_norm_eps", 1e-6), norm_style == "gemma"),
        layers=_plan_layers(arch, tensors, hidden),
        embed=embed,
        final_norm=tensors.take("model.norm.weight", hidden),
        head=embed if tied else _head(tensors, vocab, hidden),
        embed_multiplier=arch.positive("embed_multiplier", 1.0),
        logit_multiplier=arch.positive("logit_multiplier", 1.0),
        logit_softcap=arch.positive("final_logit_softcapping") if arch.has("final_logit_softcapping") else None,
        num_loops=_num_loops(arch),
        loop_norm=arch.take("loop_final_norm", bool, False),
        eos_ids=_eos_ids(source.header),
        shapes=tensors.used,
    )
    arch.finish()
    tensors.finish()
    return plan


def _head(tensors: Tensors, vocab: int, hidden: int) -> str:
    rows = max(vocab, (tensors.shape("lm_head.weight") or (vocab,))[0])
    return tensors.take("lm_head.weight", rows, hidden)


def _num_loops(arch: Keys) -> int:
    loops = arch.size("num_loops", 1)
    if loops > MOST_LOOPS:
        raise UnsupportedModelError("arch.num_loops", f"expected at most {MOST_LOOPS}, got {loops}")
    return loops


def _plan_layers(arch: Keys, tensors: Tensors, hidden: int) -> tuple[LayerPlan, ...]:
    count = arch.size("num_layers")
    kinds = arch.take("layer_types", list)
    if len(kinds) != count:
        raise UnsupportedModelError("arch.layer_types", f"expected {count} entries, got {len(kinds)}")
    mixers = _MixerPlanner(arch, tensors, hidden, kinds)
    return tuple(_plan_layer(tensors, i, hidden, mixers.plan(i, kind)) for i, kind in enumerate(kinds))


def _plan_layer(tensors: Tensors, index: int, hidden: int, mixer: MixerPlan) -> LayerPlan:
    layer = f"model.layers.{index}."
    width = (tensors.shape(layer + "mlp.gate_proj.weight") or (0,))[0]
    if width < 1:
        raise UnsupportedModelError(
            layer + "mlp.gate_proj.weight", "the layer has no dense FFN of the gate/up/down kind"
        )
    return LayerPlan(
        index=index,
        mixer=mixer,
        ffn_size=width,
        input_norm=tensors.take(layer + "input_layernorm.weight", hidden),
        post_norm=tensors.take(layer + "post_attention_layernorm.weight", hidden),
        gate_proj=tensors.take(layer + "mlp.gate_proj.weight", width, hidden),
        up_proj=tensors.take(layer + "mlp.up_proj.weight", width, hidden),
        down_proj=tensors.take(layer + "mlp.down_proj.weight", hidden, width),
    )


class _MixerPlanner:
    """Plans the mixer of each layer. What all layers of a kind share is consumed only if there is such a layer."""

    def __init__(self, arch: Keys, tensors: Tensors, hidden: int, kinds: list[Any]) -> None:
        self._tensors, self._hidden = tensors, hidden
        self._kv_default = arch.size("num_attention_heads")
        self._heads = self._heads_per_layer(arch, len(kinds))
        self._kv_heads = arch.size("num_kv_heads", self._kv_default)
        self._head_dim = arch.size("head_dim", max(1, hidden // self._kv_default))
        if self._head_dim > MOST_HEAD_DIM:
            raise UnsupportedModelError("arch.head_dim", f"expected at most {MOST_HEAD_DIM}, got {self._head_dim}")
        self._scale = arch.positive("query_pre_attn_scalar", float(self._head_dim)) ** -0.5
        self._softcap = arch.positive("attn_logit_softcapping") if arch.has("attn_logit_softcapping") else None
        self._window = arch.size("sliding_window") if "SlidingAttention" in kinds else None
        self._rotary, self._local_rotary = plan_rotary(arch, self._head_dim, sliding="SlidingAttention" in kinds)
        self._delta = self._delta_sizes(arch) if "LinearAttention" in kinds else None

    def plan(self, index: int, kind: Any) -> MixerPlan:
        if kind == "LinearAttention" and self._delta is not None:
            return self._delta_net(f"model.layers.{index}.linear_attn.", *self._delta)
        if kind == "FullAttention":
            return self._attention(index, None, self._rotary)
        if kind == "SlidingAttention":
            return self._attention(index, self._window, self._local_rotary)
        raise UnsupportedModelError(f"arch.layer_types[{index}]", f"this kind of layer is not supported: {kind!r}")

    def _heads_per_layer(self, arch: Keys, count: int) -> list[int]:
        heads = arch.take("attention_heads_per_layer", list, [])
        if not heads:
            return [self._kv_default] * count
        if len(heads) != count or any(type(h) is not int or h < 1 for h in heads):
            raise UnsupportedModelError("arch.attention_heads_per_layer", f"expected {count} positive sizes")
        return list(heads)

    def _attention(self, index: int, window: int | None, rotary: RotaryPlan) -> AttentionPlan:
        tensors, C, H, G, D = self._tensors, self._hidden, self._heads[index], self._kv_heads, self._head_dim
        if H % G:
            raise UnsupportedModelError("arch.num_kv_heads", f"{H} query heads can't be shared by {G} kv heads")
        name = f"model.layers.{index}.self_attn."
        interleaved = tensors.shape(name + "q_proj.weight")[:1] == (2 * H * D,)
        g_proj = name + "g_proj.weight"
        gate_rows = H if tensors.shape(g_proj)[:1] == (H,) else H * D
        gate: Literal["interleaved", "projection"] | None = "interleaved" if interleaved else None
        if tensors.has(g_proj):
            if interleaved:
                raise UnsupportedModelError(g_proj, "q_proj already holds an output gate")
            gate = "projection"
        q_rows = H * D * (2 if interleaved else 1)
        return AttentionPlan(
            heads=H,
            kv_heads=G,
            head_dim=D,
            scale=self._scale,
            window=window,
            softcap=self._softcap,
            rotary=rotary,
            gate=gate,
            q_proj=tensors.take(name + "q_proj.weight", q_rows, C),
            k_proj=tensors.take(name + "k_proj.weight", G * D, C),
            v_proj=tensors.take(name + "v_proj.weight", G * D, C),
            o_proj=tensors.take(name + "o_proj.weight", C, H * D),
            q_bias=tensors.maybe(name + "q_proj.bias", q_rows),
            k_bias=tensors.maybe(name + "k_proj.bias", G * D),
            v_bias=tensors.maybe(name + "v_proj.bias", G * D),
            o_bias=tensors.maybe(name + "o_proj.bias", C),
            q_norm=tensors.maybe(name + "q_norm.weight", D),
            k_norm=tensors.maybe(name + "k_norm.weight", D),
            g_proj=tensors.maybe(g_proj, gate_rows, C),
        )

    def _delta_sizes(self, arch: Keys) -> tuple[int, int, int, int, int]:
        """Key heads, value heads, key dim, value dim, taps."""
        core = Keys(arch.take("linear_core", dict), "arch.linear_core")
        kind = core.take("kind", str)
        if kind != "gated_delta_net":
            raise UnsupportedModelError("arch.linear_core.kind", f"only 'gated_delta_net' is supported, got {kind!r}")
        sizes = (
            arch.size("linear_num_key_heads"),
            arch.size("linear_num_value_heads"),
            arch.size("linear_key_head_dim"),
            arch.size("linear_value_head_dim"),
            arch.size("linear_conv_kernel_dim"),
        )
        # The core repeats two of them, and must not contradict.
        for key, value in (("num_heads", sizes[1]), ("value_head_dim", sizes[3])):
            if core.size(key, value) != value:
                raise UnsupportedModelError(f"arch.linear_core.{key}", f"expected {value}, as arch.linear_* say")
        core.finish()
        if sizes[1] % sizes[0]:
            raise UnsupportedModelError(
                "arch.linear_num_key_heads", f"{sizes[1]} value heads can't be shared by {sizes[0]} key heads"
            )
        return sizes

    def _delta_net(self, name: str, nk: int, nv: int, dk: int, dv: int, taps: int) -> DeltaNetPlan:
        tensors, C = self._tensors, self._hidden
        channels = 2 * nk * dk + nv * dv
        conv = name + "conv1d.weight"
        conv_shape = (channels, 1, taps) if len(tensors.shape(conv)) == 3 else (channels, taps)
        rows = {"qkv": channels, "z": nv * dv, "a": nv, "b": nv}
        qkv, z, a, b = (tensors.take(f"{name}in_proj_{part}.weight", size, C) for part, size in rows.items())
        return DeltaNetPlan(
            key_heads=nk,
            value_heads=nv,
            key_dim=dk,
            value_dim=dv,
            taps=taps,
            conv_shape=conv_shape,
            in_proj=(qkv, z, a, b),
            conv=tensors.take(conv, *conv_shape),
            A_log=tensors.take(name + "A_log", nv),
            dt_bias=tensors.take(name + "dt_bias", nv),
            norm=tensors.take(name + "norm.weight", dv),
            out_proj=tensors.take(name + "out_proj.weight", C, nv * dv),
        )


def _eos_ids(header: Mapping[str, Any]) -> tuple[int, ...]:
    config = header.get("tokenizer_config")
    ids = config.get("eos_token_ids") if isinstance(config, dict) else None
    return tuple(i for i in ids if type(i) is int) if isinstance(ids, list) else ()
