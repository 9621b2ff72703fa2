"""The whole model and its loss by torch.autograd, straight from tensors by their names in the file, in their dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles import attention, loss
from tests.oracles.norms import rmsnorm
from tests.oracles.rope import rope
from tests.oracles.swiglu import swiglu


@dataclass(frozen=True)
class Options:
    """What the tensors alone don't say. `m`, `w`, `sink`, `seal`: the O(1) kernel of the `converted` layers."""

    H: int
    G: int
    D: int
    eps: float
    plus_one: bool
    theta: float
    rotary_dim: int
    layers: int
    converted: tuple[int, ...]
    m: int
    w: int
    sink: int
    seal: int


def hidden(tensors: Mapping[str, Tensor], options: Options, ids: Tensor, *, student: bool) -> Tensor:
    """Normalised hidden rows [B * T, C] of ids [B, T]: exact attention, or the O(1) kernel in converted layers."""
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(options.layers):
        own = {name.removeprefix(f"model.layers.{i}."): t for name, t in tensors.items()}
        x = layer(x, own, options, converted=student and i in options.converted)
    return rmsnorm(x, tensors["model.norm.weight"], options.eps, options.plus_one).flatten(0, 1)


def layer(x: Tensor, own: Mapping[str, Tensor], options: Options, *, converted: bool) -> Tensor:
    """One layer over x [B, T, C]."""
    B, T, _ = x.shape
    H, G, D = options.H, options.G, options.D

    def norm(rows: Tensor, name: str) -> Tensor:
        return rmsnorm(rows, own[name], options.eps, options.plus_one)

    def product(rows: Tensor, name: str) -> Tensor:
        y = rows @ own[f"self_attn.{name}_proj.weight"].T
        return y + own[f"self_attn.{name}_proj.bias"] if f"self_attn.{name}_proj.bias" in own else y

    n1 = norm(x, "input_layernorm.weight")
    q, k, v = (product(n1, name).view(B, T, -1, D) for name in "qkv")
    if "self_attn.q_norm.weight" in own:
        q = norm(q, "self_attn.q_norm.weight")
    if "self_attn.k_norm.weight" in own:
        k = norm(k, "self_attn.k_norm.weight")
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    q, k = (rope(heads, options.rotary_dim, options.theta) for heads in (q, k))
    out = attend(q.unflatten(1, (G, H // G)), k, v, options, converted)
    h1 = x + product(out.permute(0, 3, 1, 2, 4).reshape(B, T, H * D), "o")
    n2 = norm(h1, "post_attention_layernorm.weight")
    act = swiglu(n2 @ own["mlp.gate_proj.weight"].T, n2 @ own["mlp.up_proj.weight"].T)
    return h1 + act @ own["mlp.down_proj.weight"].T


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, converted: bool) -> Tensor:
    scale = attention.default_scale(options.D)
    seal, w, sink = options.seal, options.w, options.sink
    if not converted or seal <= w + sink + 8 or seal >= q.shape[-2]:
        return attention.causal_attention(q, k, v, scale)
    m = min(max(seal // 8, 4), options.m)
    with torch.no_grad():
        Qt, Kt = attention.segment_means(q, seal, m), attention.segment_means(k, seal, m)
        M = attention.landmark_inverse(Qt, Kt[:, :, None], scale)
    return attention.o1_attention(q, k, v, M, seal=seal, window=w, sink=sink, scale=scale).out


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
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    with torch.no_grad():
        teacher = hidden(tensors, options, ids, student=False)
    rows = hidden({**tensors, **leaves}, options, ids, student=True)
    ce = loss.ce(rows, head, targets.flatten()).mean()
    kl = loss.kl(rows, teacher, head).mean()
    ((1 - kl_weight) * ce + kl_weight * kl).backward()
    return ce.item(), kl.item(), {name: leaf.grad for name, leaf in leaves.items()}
