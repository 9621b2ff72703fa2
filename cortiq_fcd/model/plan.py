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
from cortiq_fcd.model.consumed import Keys, Shaped, Tensors
from cortiq_fcd.model.mixers import MixerPlan, MixerPlanner

STANDALONE_SKILL_BIT = 1 << 6
# Far beyond any model, and every loop is planned as visits of its own.
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
        eos_ids=tuple(i for i in _said_eos_ids(source.header) if 0 <= i < vocab),
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
    mixers = MixerPlanner(arch, tensors, hidden, kinds)
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


def eos_notes(header: Mapping[str, Any], plan: ModelPlan) -> tuple[str, ...]:
    """What a user must be told about ids that were to end a text and are no token's."""
    lost = [str(i)[:20] for i in _said_eos_ids(header) if i not in plan.eos_ids]
    if not lost:
        return ()
    return (
        f"tokenizer_config.eos_token_ids: outside the vocabulary (0 to {plan.vocab_size - 1}) and ignored:"
        f" {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}",
    )


def _said_eos_ids(header: Mapping[str, Any]) -> tuple[int, ...]:
    config = header.get("tokenizer_config")
    ids = config.get("eos_token_ids") if isinstance(config, dict) else None
    return tuple(i for i in ids if type(i) is int) if isinstance(ids, list) else ()
