"""Rope settings: both of transformers' spellings to the keys of `arch`, and back.

Old: rope_theta, partial_rotary_factor and rope_scaling {type or rope_type, ...}. New: all of it in rope_parameters.
Llama 3's scaling becomes rope_freq_factors (plain frequency / scaled frequency), linear scaling too; yarn keeps its
numbers. Scalings that change with the length of a text (dynamic, longrope) have no form in CMF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.io.hf.jsonfile import Settings

RECORD = "rope_parameters"  # key of provenance.huggingface: the settings that the factors were made from
RECORDED_KEYS = (
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)

_IGNORED = {
    "mrope_section": "positions of a text are the same on all axes, so how they share the frequencies has no effect",
    "mrope_interleaved": "as mrope_section",
}
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def rope_settings(config: Settings, default_partial: float) -> dict[str, Any]:
    """The settings in the new spelling, complete: rope_type, rope_theta, partial_rotary_factor and the scaling's own.

    UnsupportedModelError when the two spellings contradict each other, or settings differ by kind of layer.
    """
    old, new = config.maybe("rope_scaling"), config.maybe("rope_parameters")
    if old and new and old != new:
        config.refuse("rope_scaling", "contradicts rope_parameters")
    found = new or old or {}
    if not isinstance(found, dict):
        config.refuse("rope_parameters", f"expected an object, got {str(found)[:80]}")
    if any(isinstance(value, dict) for value in found.values()):
        config.refuse("rope_parameters", "settings by kind of layer are not supported")
    settings = {key: value for key, value in found.items() if value is not None}
    kind = settings.pop("type", None)
    if settings.setdefault("rope_type", kind or "default") != (kind or settings["rope_type"]):
        config.refuse("rope_scaling.type", "contradicts rope_type")
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", default_partial)):
        outer = config.maybe(key)
        inner = settings.setdefault(key, default if outer is None else outer)
        if outer is not None and inner != outer:
            config.refuse(key, f"{outer} contradicts {inner} in rope_parameters")
    return settings


def arch_keys(rope: Mapping[str, Any], head_dim: int, max_positions: int, outer_original: Any) -> dict[str, Any]:
    """rope_theta, partial_rotary_factor and, where frequencies are scaled, rope_freq_factors or yarn.

    `outer_original` is config.json's original_max_position_embeddings, which wins over the one inside, as it does in
    transformers. UnsupportedModelError names the setting that has no form in CMF.
    """
    settings = Settings(rope, "config.json: rope_parameters.")
    kind = settings.take("rope_type", str)
    theta, partial = settings.positive("rope_theta"), settings.positive("partial_rotary_factor")
    found: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": partial}
    if partial > 1:
        settings.refuse("partial_rotary_factor", f"expected at most 1, got {partial}")
    half = max(2, math.floor(head_dim * partial)) // 2
    if kind == "linear":
        found["rope_freq_factors"] = [settings.positive("factor")] * half
    elif kind in ("llama3", "yarn"):
        original = settings.size("original_max_position_embeddings", max_positions)
        original = original if outer_original is None else outer_original
        if type(original) is not int or original < 1:
            settings.refuse("original_max_position_embeddings", f"expected a positive size, got {original!r}")
        if kind == "llama3":
            try:
                found["rope_freq_factors"] = _llama3_factors(settings, theta, half, original)
            except (OverflowError, ZeroDivisionError):
                settings.refuse("rope_theta", f"frequencies of {theta} are no finite numbers")
        else:
            found["yarn"] = _yarn(settings, original, max_positions)
    elif kind != "default":
        settings.refuse("rope_type", f"{kind!r} has no form in CMF; known are default, linear, llama3 and yarn")
    settings.finish(_IGNORED, {"truncate": (True,)})
    return found


def _llama3_factors(settings: Settings, theta: float, half: int, original: int) -> list[float]:
    """Plain over scaled frequencies: 1 for short wavelengths, `factor` for long ones, blended between."""
    factor = settings.positive("factor")
    low, high = settings.positive("low_freq_factor"), settings.positive("high_freq_factor")
    if high <= low:
        settings.refuse("high_freq_factor", f"expected more than low_freq_factor ({low}), got {high}")
    divisors = []
    for i in range(half):
        turns = original * theta ** (-i / half) / (2 * math.pi)  # over the original context
        sharp = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - sharp) / factor + sharp))
    return divisors


def _yarn(settings: Settings, original: int, max_positions: int) -> dict[str, Any]:
    """`arch.yarn`. A factor not said is the ratio of the contexts; zeros mean "not said", as in transformers."""
    factor = settings.positive("factor", max_positions / original)
    found: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
    for key in _YARN_NUMBERS:
        if settings.has(key) and (value := settings.take(key, float)):
            found[key] = value
    if settings.has("truncate"):
        found["truncate"] = settings.take("truncate", bool)
    return found


def rope_parameters(arch: Mapping[str, Any], head_dim: int, recorded: Any) -> dict[str, Any]:
    """The rope_parameters of a config.json for this arch. `recorded`: what the file's own record says they were.

    The record counts only when it gives the same factors again. UnsupportedModelError for factors that neither it nor
    linear scaling explains.
    """
    common = {
        "rope_theta": float(arch.get("rope_theta") or 10000.0),
        "partial_rotary_factor": float(arch.get("partial_rotary_factor") or 1.0),
    }
    yarn, factors = arch.get("yarn"), arch.get("rope_freq_factors")
    if yarn:
        return {**common, **{key: value for key, value in yarn.items() if key != "type"}, "rope_type": "yarn"}
    if not factors:
        return {**common, "rope_type": "default"}
    if isinstance(recorded, dict) and _explains(recorded, factors, head_dim):
        return {**recorded, **common}
    if len(set(factors)) == 1:
        return {**common, "rope_type": "linear", "factor": float(factors[0])}
    raise UnsupportedModelError(
        "arch.rope_freq_factors",
        "the file does not record what they were made from, and config.json can't hold them as they are",
    )


def _explains(recorded: dict[str, Any], factors: list[float], head_dim: int) -> bool:
    try:
        again = arch_keys(recorded, head_dim, 0, None).get("rope_freq_factors", [])
    except UnsupportedModelError:
        return False
    return len(again) == len(factors) and all(
        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(again, factors, strict=True)
    )
