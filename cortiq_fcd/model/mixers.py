"""What mixes positions in a layer, softmax attention or GatedDeltaNet, planned from header and tensor shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.model.consumed import Keys, Tensors
from cortiq_fcd.model.rotary import RotaryPlan, plan_rotary

# Far beyond any model: a header alone must not cost memory (angles are planned before shapes are compared).
MOST_HEAD_DIM = 1 << 16


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


class MixerPlanner:
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
        """The mixer of one layer, whose kind is an entry of layer_types."""
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
