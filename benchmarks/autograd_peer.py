"""The same step as a PyTorch user would write it: autograd, per-layer checkpointing, the O(1) kernel as matrices.

Dense Llama/Qwen models only. It is the peer that bench_step.py compares with, and an independent check of its loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cortiq_fcd.model.conversion import Conversion, landmark_count
from cortiq_fcd.model.mixers import AttentionPlan
from cortiq_fcd.model.plan import LayerPlan, ModelPlan


class Peer:
    """A model whose layers in `setting` are converted; `tensors` by their names in the file."""

    def __init__(self, plan: ModelPlan, tensors: Mapping[str, Tensor], setting: Conversion, lr: float) -> None:
        self.plan, self.setting = plan, setting
        self.frozen = dict(tensors)
        names = [name for i in setting.layers for name in plan.layers[i].trainable]
        self.trained = {name: tensors[name].clone().requires_grad_() for name in names}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=lr, weight_decay=0.01)

    def step(self, ids: Tensor, targets: Tensor, kl_weight: float) -> tuple[float, float]:
        """One optimizer step over windows ids [B, T]; ce and kl."""
        head = self.frozen[self.plan.head]
        with torch.no_grad():
            teacher = self.hidden(ids, self.frozen, converted=False) @ head.T
        student = self.hidden(ids, {**self.frozen, **self.trained}, converted=True) @ head.T
        ce = functional.cross_entropy(student.flatten(0, 1), targets.flatten())
        log_student, log_teacher = student.log_softmax(-1).flatten(0, 1), teacher.log_softmax(-1).flatten(0, 1)
        kl = functional.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")
        self.optimizer.zero_grad()
        ((1 - kl_weight) * ce + kl_weight * kl).backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        return ce.item(), kl.item()

    def hidden(self, ids: Tensor, tensors: Mapping[str, Tensor], *, converted: bool) -> Tensor:
        """Normalised hidden rows [B, T, C]."""
        x = tensors[self.plan.embed][ids]
        for layer in self.plan.layers:
            own = converted and layer.index in self.setting.converted
            if torch.is_grad_enabled():
                x = checkpoint(self.layer, x, layer, tensors, own, use_reentrant=False)
            else:
                x = self.layer(x, layer, tensors, own)
        return self.norm(x, tensors[self.plan.final_norm])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis."""
        gain = weight + 1 if self.plan.norm.plus_one else weight
        return functional.rms_norm(x, x.shape[-1:], gain, self.plan.norm.eps)

    def layer(self, x: Tensor, layer: LayerPlan, tensors: Mapping[str, Tensor], converted: bool) -> Tensor:
        """One layer over x [B, T, C]."""
        plan = layer.mixer
        assert isinstance(plan, AttentionPlan)
        B, T, _ = x.shape
        n1 = self.norm(x, tensors[layer.input_norm])

        def heads(matrix: str, bias: str | None, norm: str | None, rotate: bool) -> Tensor:
            y = functional.linear(n1, tensors[matrix], tensors[bias] if bias else None)
            y = y.view(B, T, -1, plan.head_dim).transpose(1, 2)
            y = self.norm(y, tensors[norm]) if norm else y
            return rotated(y, plan.rotary.frequencies) if rotate else y

        q = heads(plan.q_proj, plan.q_bias, plan.q_norm, True)
        k = heads(plan.k_proj, plan.k_bias, plan.k_norm, True).repeat_interleave(plan.heads // plan.kv_heads, 1)
        v = heads(plan.v_proj, plan.v_bias, None, False).repeat_interleave(plan.heads // plan.kv_heads, 1)
        if converted:
            out = o1_matrix(q, k, v, self.setting)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = out.transpose(1, 2).reshape(B, T, -1)
        h1 = x + functional.linear(rows, tensors[plan.o_proj], tensors[plan.o_bias] if plan.o_bias else None)
        n2 = self.norm(h1, tensors[layer.post_norm])
        act = functional.silu(functional.linear(n2, tensors[layer.gate_proj]))
        act = act * functional.linear(n2, tensors[layer.up_proj])
        return h1 + functional.linear(act, tensors[layer.down_proj])


def rotated(x: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    """Rotary embedding of x [B, H, T, D]."""
    half = len(frequencies)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def o1_matrix(q: Tensor, k: Tensor, v: Tensor, setting: Conversion) -> Tensor:
    """The O(1) kernel in T x T matrices, f32 with one shift a row; M in f64."""
    T, D = q.shape[-2:]
    seal, scale = setting.seal, 1 / math.sqrt(D)
    m = landmark_count(seal, setting.m)
    bounds = [i * seal // m for i in range(m + 1)]
    Qt, Kt = (torch.stack([x[..., a:b, :].mean(-2) for a, b in pairwise(bounds)], -2) for x in (q, k))
    with torch.no_grad():
        kernel = (Qt.double() @ Kt.double().mT * scale).exp()
        gram = kernel.mT @ kernel
        ridge = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        M = torch.linalg.solve(gram + ridge * torch.eye(m, dtype=torch.float64), kernel.mT).float()
    t, j = torch.arange(T)[:, None], torch.arange(T)
    causal = j <= t
    near = causal & ((t < seal) | (t - j < setting.w) | (j < setting.sink))
    logits = (q @ k.mT * scale).masked_fill(~near, -torch.inf)
    top = logits.amax(-1, keepdim=True).detach()
    left, right = q @ Kt.mT * scale, Qt @ k.mT * scale
    far = ((left - top).exp() @ M @ right.exp()) * (causal & ~near)
    far = far * (far.sum(-1, keepdim=True) >= 0)
    weights = (logits - top).exp() + far
    return (weights @ v) / weights.sum(-1, keepdim=True).clamp_min(1e-30)
