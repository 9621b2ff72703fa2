"""The tensors of a model in the order of execution, and where in the directory each one's rows lie.

The list follows from config.json alone. A tensor that is missing is refused, and so is one that is too much: left out,
it could make another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.io.hf.families import Described, Family, require_tied
from cortiq_fcd.io.hf.safetensors import StoredTensor, Weights

Role = Literal["embedding", "matrix", "gate", "vector"]  # what quantization.py decides by
Rows = npt.NDArray[np.int64]

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
# Tensors of the directory that a text's forward never uses, with what is told of them.
LEFT_OUT: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r".*rotary_emb\.inv_freq"), "rotary frequencies (computed from the settings)"),
    (re.compile(r"(model\.)?mtp\..*"), "extra prediction heads (mtp)"),
    (re.compile(r"(model\.)?visual\..*"), "the part for images and video (visual)"),
)


@dataclass(frozen=True)
class Placed:
    """One tensor of the CMF file. `rows`: which rows of the stored one it is made of, None for all, as they are."""

    name: str
    role: Role
    shape: tuple[int, ...]
    stored: StoredTensor
    rows: Rows | None = None

    def read(self) -> Weights:
        """The weights; errors as `StoredTensor.read`."""
        weights = self.stored.read()
        return weights if self.rows is None else weights[self.rows]


@dataclass(frozen=True)
class Placement:
    """All tensors in order, whether the head is the embedding, and what of the directory is not used."""

    tensors: tuple[Placed, ...]
    tied: bool
    notes: tuple[str, ...]


def place(described: Described, stored: Mapping[str, StoredTensor]) -> Placement:
    """Find every tensor of the model; UnsupportedModelError names what is missing, of a wrong size, or too much."""
    finder = _Finder(stored)
    arch = described.arch
    tied = require_tied(described.tied, "lm_head.weight" in stored)
    found = [finder.take("embed_tokens.weight", "embedding")]
    for i, kind in enumerate(arch["layer_types"]):
        found += _layer(finder, described, f"layers.{i}.", kind)
    found.append(finder.take("norm.weight", "vector"))
    if not tied:
        found.append(finder.take_whole("lm_head.weight", "embedding"))
    elif "lm_head.weight" in stored:
        finder.skip_copy("lm_head.weight", found[0].stored)
    return Placement(tuple(found), tied, finder.finish())


def layer_names(kind: str, family: Family, biases: tuple[str, ...]) -> Iterator[tuple[str, Role]]:
    """The tensors of a layer in the order of execution, without its prefix."""
    yield "input_layernorm.weight", "vector"
    yield from _delta_names() if kind == "LinearAttention" else _attention_names(family, biases)
    yield "post_attention_layernorm.weight", "vector"
    for part in ("gate", "up", "down"):
        yield f"mlp.{part}_proj.weight", "matrix"


def _attention_names(family: Family, biases: tuple[str, ...]) -> Iterator[tuple[str, Role]]:
    for part in "qkvo":
        if part == "o" and family.qk_norm:
            yield "self_attn.q_norm.weight", "vector"
            yield "self_attn.k_norm.weight", "vector"
        yield f"self_attn.{part}_proj.weight", "matrix"
        if part in biases:
            yield f"self_attn.{part}_proj.bias", "vector"


def _delta_names() -> Iterator[tuple[str, Role]]:
    yield "linear_attn.in_proj_qkv.weight", "matrix"
    yield "linear_attn.in_proj_z.weight", "matrix"
    yield "linear_attn.in_proj_a.weight", "gate"
    yield "linear_attn.in_proj_b.weight", "gate"
    for part in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"):
        yield f"linear_attn.{part}", "vector"
    yield "linear_attn.out_proj.weight", "matrix"


def fused_rows(arch: Mapping[str, Any]) -> dict[str, tuple[str, Rows]]:
    """For each in_proj of a GatedDeltaNet layer: the fused matrix of Qwen3-Next that holds it, and its rows there.

    in_proj_qkvz holds, key head after key head, its q, its k, and the v and z of its value heads; in_proj_ba the b and
    a of those.
    """
    G, dk = arch["linear_num_key_heads"], arch["linear_key_head_dim"]
    share = arch["linear_num_value_heads"] // G
    wide = share * arch["linear_value_head_dim"]
    qkvz = np.arange(G * (2 * dk + 2 * wide)).reshape(G, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(qkvz, (dk, 2 * dk, 2 * dk + wide), axis=1))
    b, a = (part.reshape(-1) for part in np.split(np.arange(2 * G * share).reshape(G, -1), (share,), axis=1))
    return {
        "in_proj_qkv": ("in_proj_qkvz", np.concatenate((q, k, v))),
        "in_proj_z": ("in_proj_qkvz", z),
        "in_proj_a": ("in_proj_ba", a),
        "in_proj_b": ("in_proj_ba", b),
    }


def _layer(finder: _Finder, described: Described, layer: str, kind: str) -> Iterator[Placed]:
    fused = kind == "LinearAttention" and finder.has(layer + "linear_attn.in_proj_qkvz.weight")
    arch = described.arch
    if fused and arch["linear_num_value_heads"] % arch["linear_num_key_heads"]:
        raise UnsupportedModelError("linear_num_key_heads", "does not divide linear_num_value_heads")
    sources = fused_rows(arch) if fused else {}
    for name, role in layer_names(kind, described.family, described.biases):
        part = name.removeprefix("linear_attn.").removesuffix(".weight")
        if name.startswith("linear_attn.") and part in sources:
            whole, rows = sources[part]
            yield finder.take_rows(layer + name, role, f"{layer}linear_attn.{whole}.weight", rows)
        else:
            yield finder.take(layer + name, role)


class _Finder:
    """The stored tensors, and which of them were used."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._used: set[str] = set()
        found = [prefix for prefix in PREFIXES if prefix + "embed_tokens.weight" in stored]
        self._prefix = found[0] if found else PREFIXES[0]

    def has(self, name: str) -> bool:
        return self._prefix + name in self._stored

    def take(self, name: str, role: Role) -> Placed:
        stored = self._get(self._prefix + name)
        return Placed("model." + name, role, stored.shape, stored)

    def take_whole(self, name: str, role: Role) -> Placed:
        """A tensor outside the part that the prefix names."""
        stored = self._get(name)
        return Placed(name, role, stored.shape, stored)

    def take_rows(self, name: str, role: Role, whole: str, rows: Rows) -> Placed:
        stored = self._get(self._prefix + whole)
        most = int(rows.max()) + 1
        if len(stored.shape) != 2 or stored.shape[0] < most:
            why = f"expected a matrix of {most} rows or more, got {list(stored.shape)}"
            raise UnsupportedModelError(stored.name, why)
        return Placed("model." + name, role, (rows.size, stored.shape[1]), stored, rows)

    def skip_copy(self, name: str, original: StoredTensor) -> None:
        """Leave out a tied head, provided that it says the same as the embedding."""
        copy = self._get(name)
        alike = (copy.dtype, copy.shape) == (original.dtype, original.shape)
        if not alike or any(a != b for a, b in zip(copy.pieces(), original.pieces(), strict=True)):
            why = "config.json says it is the embedding (tie_word_embeddings), and it is not"
            raise UnsupportedModelError(name, why, hint="set tie_word_embeddings to what is meant")

    def finish(self) -> tuple[str, ...]:
        """What is left out, as notes; UnsupportedModelError for a tensor that nothing explains."""
        counts: dict[str, int] = {}
        for name in self._stored:
            if name in self._used:
                continue
            reason = next((why for pattern, why in LEFT_OUT if pattern.fullmatch(name)), None)
            if reason is None:
                raise UnsupportedModelError(
                    name, "config.json tells of no such tensor, and it could be part of the model"
                )
            counts[reason] = counts.get(reason, 0) + 1
        silent = LEFT_OUT[0][1]
        return tuple(f"left out: {reason}, {n} tensors" for reason, n in counts.items() if reason != silent)

    def _get(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise UnsupportedModelError(name, "config.json asks for this tensor, and the directory has none")
        self._used.add(name)
        return self._stored[name]
