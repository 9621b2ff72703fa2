"""The whole model and its loss by torch.autograd: tensors by their names in the file, `arch` as the format has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracles import attention, delta_net, loss
from tests.oracles.norms import rmsnorm
from tests.oracles.sigmoid_gate import sigmoid_gate
from tests.oracles.swiglu import swiglu


@dataclass(frozen=True)
class Options:
    """`arch` of the header. `m`, `w`, `sink`, `seal`: the O(1) kernel of the `converted` layers."""

    arch: Mapping[str, Any]
    converted: tuple[int, ...]
    m: int
    w: int
    sink: int
    seal: int

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rmsnorm(x, weight, self.arch["rms_norm_eps"], self.arch.get("norm_style") == "gemma")

    def loss(self, rows: Tensor, tensors: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """Cross-entropy of each row."""
        return loss.ce(rows, self.head(tensors), targets, self.arch.get("final_logit_softcapping"))

    def kl(self, rows: Tensor, teacher: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """KL(teacher || student) of each row."""
        cap = self.arch.get("final_logit_softcapping")
        return loss.kl(rows, teacher, self.head(tensors), None, cap, cap)

    def head(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])[: self.arch["vocab_size"]]


def hidden(tensors: Mapping[str, Tensor], options: Options, ids: Tensor, *, student: bool) -> Tensor:
    """What the head multiplies, [B * T, C], for ids [B, T]: exact attention, or the O(1) kernel in converted layers."""
    arch = options.arch
    x = tensors["model.embed_tokens.weight"][ids] * arch.get("embed_multiplier", 1.0)
    for loop in range(arch.get("num_loops", 1)):
        if loop and arch.get("loop_final_norm", False):
            x = options.norm(x, tensors["model.norm.weight"])
        for i in range(arch["num_layers"]):
            own = {name.removeprefix(f"model.layers.{i}."): t for name, t in tensors.items()}
            x = layer(x, own, options, i, converted=student and i in options.converted)
    return (options.norm(x, tensors["model.norm.weight"]) * arch.get("logit_multiplier", 1.0)).flatten(0, 1)


def layer(x: Tensor, own: Mapping[str, Tensor], options: Options, index: int, *, converted: bool) -> Tensor:
    """One layer over x [B, T, C]."""
    n1 = options.norm(x, own["input_layernorm.weight"])
    kind = options.arch["layer_types"][index]
    mixed = linear_attention(n1, own, options) if kind == "LinearAttention" else None
    h1 = x + (softmax_attention(n1, own, options, index, converted) if mixed is None else mixed)
    n2 = options.norm(h1, own["post_attention_layernorm.weight"])
    act = swiglu(n2 @ own["mlp.gate_proj.weight"].T, n2 @ own["mlp.up_proj.weight"].T)
    return h1 + act @ own["mlp.down_proj.weight"].T


def softmax_attention(n1: Tensor, own: Mapping[str, Tensor], options: Options, index: int, converted: bool) -> Tensor:
    arch = options.arch
    B, T, _ = n1.shape
    H = arch.get("attention_heads_per_layer", [arch["num_attention_heads"]] * arch["num_layers"])[index]
    G, D = arch["num_kv_heads"], arch["head_dim"]

    def product(rows: Tensor, name: str) -> Tensor:
        y = rows @ own[f"self_attn.{name}_proj.weight"].T
        return y + own[f"self_attn.{name}_proj.bias"] if f"self_attn.{name}_proj.bias" in own else y

    q, k, v = product(n1, "q").view(B, T, H, -1), product(n1, "k").view(B, T, G, D), product(n1, "v").view(B, T, G, D)
    gate = None
    if q.shape[3] == 2 * D:
        q, gate = q[..., :D], q[..., D:]
    elif "self_attn.g_proj.weight" in own:
        gate = product(n1, "g").view(B, T, H, -1)
    if "self_attn.q_norm.weight" in own:
        q = options.norm(q, own["self_attn.q_norm.weight"])
    if "self_attn.k_norm.weight" in own:
        k = options.norm(k, own["self_attn.k_norm.weight"])
    sliding = arch["layer_types"][index] == "SlidingAttention"
    q, k, v = turn(q.transpose(1, 2), arch, sliding), turn(k.transpose(1, 2), arch, sliding), v.transpose(1, 2)
    out = attend(q.unflatten(1, (G, H // G)), k, v, options, converted, arch["sliding_window"] if sliding else None)
    out = out.permute(0, 3, 1, 2, 4).reshape(B, T, H, D)
    return product((out if gate is None else sigmoid_gate(out, gate)).reshape(B, T, H * D), "o")


def turn(x: Tensor, arch: Mapping[str, Any], sliding: bool) -> Tensor:
    """Rotary positions of x [B, heads, T, D], half-split pairs."""
    factor, theta = arch.get("partial_rotary_factor", 1.0), arch.get("rope_theta", 10000.0)
    if sliding:
        factor = arch.get("local_partial_rotary_factor", factor)
        theta = arch.get("rope_local_base_freq", theta)
    half = max(2, int(x.shape[-1] * factor)) // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if "rope_freq_factors" in arch and not (sliding and "rope_local_base_freq" in arch):
        frequency = frequency / torch.tensor(arch["rope_freq_factors"], dtype=torch.float64)
    magnitude = 1.0
    if "yarn" in arch and not (sliding and ("rope_local_base_freq" in arch or "local_partial_rotary_factor" in arch)):
        frequency, magnitude = yarn(frequency, theta, arch["yarn"])
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
    turned = pairs * torch.polar(torch.full_like(angle, magnitude), angle)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def yarn(frequency: Tensor, theta: float, setting: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Frequencies between unscaled (fast) and divided (slow), and what q and k are multiplied by."""
    turns = setting["original_max_position_embeddings"] * frequency / (2 * torch.pi)
    index = torch.arange(len(frequency), dtype=torch.float64)

    def place(count: float) -> Tensor:
        """Where, between pairs, a frequency makes so many turns: log turns falls evenly with the index."""
        return (turns[0].log() - torch.tensor(count, dtype=torch.float64).log()) * len(frequency) / math.log(theta)

    low, high = place(setting.get("beta_fast", 32.0)), place(setting.get("beta_slow", 1.0))
    if setting.get("truncate", True):
        low, high = low.floor(), high.ceil()
    low, high = low.clamp(min=0), high.clamp(max=2 * len(frequency) - 1)
    scaled = ((index - low) / (high - low).clamp(min=0.001)).clamp(0, 1)
    grown = 0.1 * math.log(setting["factor"])
    magnitude = setting.get("attention_factor", grown + 1)
    if "mscale" in setting:
        magnitude = (grown * setting["mscale"] + 1) / (grown * setting["mscale_all_dim"] + 1)
    return frequency * (1 - scaled) + frequency / setting["factor"] * scaled, magnitude


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, converted: bool, window: int | None) -> Tensor:
    scale = options.arch.get("query_pre_attn_scalar", q.shape[-1]) ** -0.5
    seal, w, sink = options.seal, options.w, options.sink
    if not converted or seal <= w + sink + 8 or seal >= q.shape[-2]:
        return attention.causal_attention(q, k, v, scale, window, options.arch.get("attn_logit_softcapping"))
    m = min(max(seal // 8, 4), options.m)
    with torch.no_grad():
        Qt, Kt = attention.segment_means(q, seal, m), attention.segment_means(k, seal, m)
        M = attention.landmark_inverse(Qt, Kt[:, :, None], scale)
    return attention.o1_attention(q, k, v, M, seal=seal, window=w, sink=sink, scale=scale).out


def linear_attention(n1: Tensor, own: Mapping[str, Tensor], options: Options) -> Tensor:
    arch = options.arch
    streams = [n1 @ own[f"linear_attn.in_proj_{name}.weight"].T for name in ("qkv", "z", "a", "b")]
    G = arch["linear_num_key_heads"]
    mixed = delta_net.gated_delta_net(
        *streams,
        conv=own["linear_attn.conv1d.weight"].flatten(1),
        A_log=own["linear_attn.A_log"],
        dt_bias=own["linear_attn.dt_bias"],
        norm=own["linear_attn.norm.weight"],
        eps=arch["rms_norm_eps"],
        G=G,
        R=arch["linear_num_value_heads"] // G,
        Dk=arch["linear_key_head_dim"],
        Dv=arch["linear_value_head_dim"],
    )
    return mixed @ own["linear_attn.out_proj.weight"].T


def loss_and_gradients(
    tensors: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    options: Options,
    ids: Tensor,
    targets: Tensor,
    kl_weight: float,
) -> tuple[float, float, dict[str, Tensor]]:
    """(ce, kl, gradient of every trained tensor). `tensors` are the teacher; with `trained` put in, the student."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in trained.items()}
    with torch.no_grad():
        teacher = hidden(tensors, options, ids, student=False)
    rows = hidden({**tensors, **leaves}, options, ids, student=True)
    ce = options.loss(rows, tensors, targets.flatten()).mean()
    kl = options.kl(rows, teacher, tensors).mean()
    ((1 - kl_weight) * ce + kl_weight * kl).backward()
    return ce.item(), kl.item(), {name: leaf.grad for name, leaf in leaves.items()}
