"""Which layers run the O(1) kernel and with what geometry: flag, else the file's own setting, else the default.

Torch-free, so that `inspect` can tell it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.model.plan import ModelPlan

DEFAULT_LANDMARKS = 32
DEFAULT_WINDOW_TOKENS = 128
DEFAULT_SINK_TOKENS = 4
# The runtime builds no skeleton for a prompt that fits into window + sink + this many tokens (spec: "w + sink + 8").
EXACT_MARGIN_TOKENS = 8
_POLISH_ONLY = "--polish-only trains such layers and leaves their attention as it is"


def is_exact(seal: int, w: int, sink: int) -> bool:
    """Whether a prompt pass of `seal` tokens stays on exact attention for ever."""
    return seal <= w + sink + EXACT_MARGIN_TOKENS


def landmark_count(seal: int, m: int) -> int:
    """Landmarks that a prompt pass of `seal` tokens really gets: clamp(seal // 8, 4, m)."""
    return min(max(seal // 8, 4), m)


def seal_choices(conversion: Conversion, seq: int) -> range:
    """Where windows of `seq` tokens can be sealed so that the O(1) kernel runs over the last eighth at least."""
    return range(conversion.w + conversion.sink + EXACT_MARGIN_TOKENS + 1, seq - seq // 8 + 1)


@dataclass(frozen=True)
class Conversion:
    """The O(1) setting of a model. `m`, `w`, `sink` as in `provenance.o1_attn`; `seal` is the training windows' tp.

    `layers` are trained; they also run the O(1) kernel, unless polish_only keeps attention exact.
    """

    layers: tuple[int, ...]
    spec: str | tuple[int, ...]
    m: int
    w: int
    sink: int
    seal: int
    polish_only: bool = False

    @property
    def converted(self) -> tuple[int, ...]:
        """Layers whose attention is the O(1) kernel."""
        return () if self.polish_only else self.layers

    def record(self) -> dict[str, Any]:
        """The value of `provenance.o1_attn`."""
        spec = self.spec if isinstance(self.spec, str) else list(self.spec)
        return {"layers": spec, "m": self.m, "w": self.w, "sink": self.sink}


def resolve_conversion(
    plan: ModelPlan,
    provenance: Any,
    *,
    layers: str | None,
    m: int | None,
    w: int | None,
    sink: int | None,
    prefill: int | None,
    seq: int,
    polish_only: bool = False,
) -> tuple[Conversion, list[str]]:
    """Resolve every field on its own (null: the file's hint, then the default). Returns the setting and warnings.

    Raises ConfigError (exit 2) for a set that can't be, and for windows so short that training would never meet the
    O(1) kernel.
    """
    hint = provenance.get("o1_attn") if isinstance(provenance, dict) else None
    hint = hint if isinstance(hint, dict) else {}
    hinted = hint.get("layers")
    where = "--o1" if layers is not None or hinted is None else "the file's provenance.o1_attn.layers"
    spec = parse_layers(layers if layers is not None else "all" if hinted is None else hinted, where)
    m = _field("m", m, hint, DEFAULT_LANDMARKS, 4)
    w = _field("w", w, hint, DEFAULT_WINDOW_TOKENS, 1)
    sink = _field("sink", sink, hint, DEFAULT_SINK_TOKENS, 0)
    chosen = expand_layers(spec, len(plan.layers), where)
    seal = seq // 2 if prefill is None else prefill
    if not 1 <= seal <= seq:
        raise ConfigError(f"--prefill {seal}: expected 1 to --seq ({seq})")
    if polish_only:
        return Conversion(chosen, spec, m, w, sink, seal, polish_only=True), []
    chosen, notes = _convertible(plan, spec, chosen, where)
    if is_exact(seal, w, sink):
        need = w + sink + EXACT_MARGIN_TOKENS + 1
        raise ConfigError(
            f"the prompt part of a window of text is {seal} tokens, and with window {w} and sink {sink} the O(1) "
            f"kernel starts after {need - 1}: there would only ever be exact attention",
            hint=_longer_windows(need, prefill, seq),
        )
    if landmark_count(seal, m) < m:
        notes.append(
            f"windows of text seal after {seal} tokens, so they use {landmark_count(seal, m)} landmarks instead of {m}"
        )
    if seal == seq:
        notes.append("--prefill equals --seq: no trained position goes through the O(1) kernel")
    return Conversion(chosen, spec, m, w, sink, seal), notes


def _convertible(
    plan: ModelPlan, spec: str | tuple[int, ...], chosen: tuple[int, ...], where: str
) -> tuple[tuple[int, ...], list[str]]:
    """The chosen layers that the O(1) kernel can replace. `all` means those, deepN drops the others with a warning, and
    a list must not name another.
    """
    obstacles = {i: plan.layers[i].mixer.obstacle for i in chosen if plan.layers[i].mixer.obstacle}
    left = tuple(i for i in chosen if i not in obstacles)
    if obstacles and not isinstance(spec, str):
        index, why = next(iter(obstacles.items()))
        raise ConfigError(f"{where} names layer {index}, which can't be converted: {why}", hint=_POLISH_ONLY)
    if not left:
        index, why = next(iter(obstacles.items()))
        raise ConfigError(
            f"{where} {spec} leaves no layer to convert: layer {index} can't be, since {why}", hint=_POLISH_ONLY
        )
    if obstacles and spec != "all":
        return left, [
            f"{where} {spec}: layers {', '.join(map(str, obstacles))} can't be converted and stay as they are"
        ]
    return left, []


def parse_layers(text: Any, where: str) -> str | tuple[int, ...]:
    """`all`, `deepN`, or a list of layer numbers (text "i,j,k" or a JSON list). Raises ConfigError."""
    if isinstance(text, list) and text and all(type(i) is int and i >= 0 for i in text):
        return tuple(sorted(set(text)))
    if isinstance(text, str):
        if text == "all" or re.fullmatch(r"deep[1-9][0-9]{0,5}", text):
            return text
        if re.fullmatch(r"[0-9]{1,6}( *, *[0-9]{1,6})*", text):
            return tuple(sorted({int(i) for i in text.split(",")}))
    if isinstance(text, str) and auto_count(text):
        raise ConfigError(
            f"{where} {text}: layers are chosen by measurement in `polish` and `eval` alone",
            hint="give the numbers of the layers that one of them chose, as 0,2,5",
        )
    raise ConfigError(
        f"{where} {text!r} is not a set of layers",
        hint="use all, deepN (as deep8) or numbers (as 0,2,5); `polish` and `eval` know auto:N (as auto:8), too",
    )


def expand_layers(spec: str | tuple[int, ...], count: int, where: str) -> tuple[int, ...]:
    """Layer numbers of a parsed set, for a model of `count` layers. Raises ConfigError for what is not there."""
    if spec == "all":
        return tuple(range(count))
    if isinstance(spec, str):
        deepest = int(spec.removeprefix("deep"))
        if deepest > count:
            raise ConfigError(f"{where} {spec}: the model has {count} layers", hint=f"use --o1 deep{count} or fewer")
        return tuple(range(count - deepest, count))
    if spec[-1] >= count:
        raise ConfigError(f"{where} names layer {spec[-1]}: the model has layers 0 to {count - 1}")
    return spec


def auto_count(layers: str | None) -> int | None:
    """N of `auto:N`, which leaves the choice of N layers to a measurement; null for every other set of layers."""
    match = re.fullmatch(r"auto:([1-9][0-9]{0,5})", layers or "")
    return int(match[1]) if match else None


def _longer_windows(need: int, prefill: int | None, seq: int) -> str:
    """The hint to get a prompt part of `need` tokens with something behind it."""
    if prefill is None:
        return f"use --seq {2 * need} or more"
    return f"use --prefill {need} or more" + (f" with --seq {need + 1} or more" if seq <= need else "")


def _field(name: str, flag: int | None, hint: Mapping[str, Any], default: int, least: int) -> int:
    if flag is not None:
        return flag
    value = hint.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise ConfigError(
            f"the file's provenance.o1_attn.{name} is {value!r}; expected a whole number of at least {least}",
            hint="give the value on the command line",
        )
    return value
