"""Rotary position angles: which dimensions turn, and how fast. Torch-free.

    angle(t, i) = t * frequency_i,   frequency_i = theta^(-2i / r),  i = 0 .. r/2 - 1

`rope_freq_factors` divides frequencies one by one (Llama 3's scaling arrives in this form). YaRN (Peng et al. 2023,
arXiv 2309.00071) slows low frequencies by its factor, keeps high ones, blends between, and multiplies q and k by a
constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cortiq_fcd.errors import UnsupportedModelError
from cortiq_fcd.model.consumed import Keys


@dataclass(frozen=True)
class RotaryPlan:
    """Frequencies [rotary_dim / 2] in radians a position, and what cos and sin are multiplied by."""

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


def plan_rotary(arch: Keys, head_dim: int, *, sliding: bool) -> tuple[RotaryPlan, RotaryPlan]:
    """The rotary plans of full and of sliding-window layers.

    Raises UnsupportedModelError for an odd number of turning dimensions and for settings that are not known.
    """
    theta = arch.positive("rope_theta", 10000.0)
    factor = arch.take("partial_rotary_factor", float, 1.0)
    half = _rotary_dim(head_dim, factor, "arch.partial_rotary_factor") // 2
    divisors = arch.numbers("rope_freq_factors")
    if divisors and len(divisors) != half:
        raise UnsupportedModelError("arch.rope_freq_factors", f"expected {half} numbers, got {len(divisors)}")
    base = _frequencies(theta, half, "arch.rope_theta")
    full = RotaryPlan(tuple(f / d for f, d in zip(base, divisors or (1.0,) * half, strict=True)))
    if not all(map(math.isfinite, full.frequencies)):
        raise UnsupportedModelError("arch.rope_freq_factors", "angles are not finite with these factors")
    yarn = arch.take("yarn", dict, {})
    if yarn:
        if divisors:
            raise UnsupportedModelError("arch.yarn", "can't be combined with rope_freq_factors")
        try:
            full = _yarn(Keys(yarn, "arch.yarn"), theta, base)
        except (ArithmeticError, ValueError):
            raise UnsupportedModelError("arch.yarn", "no finite angles come out of these numbers") from None
    if not sliding:
        return full, full
    if not arch.has("rope_local_base_freq") and not arch.has("local_partial_rotary_factor"):
        return full, full
    local_theta = arch.positive("rope_local_base_freq", theta)
    local_factor = arch.take("local_partial_rotary_factor", float, factor)
    local_dim = _rotary_dim(head_dim, local_factor, "arch.local_partial_rotary_factor")
    return full, RotaryPlan(_frequencies(local_theta, local_dim // 2, "arch.rope_local_base_freq"))


def _rotary_dim(head_dim: int, factor: float, key: str) -> int:
    rotary = max(2, math.floor(head_dim * factor)) if math.isfinite(head_dim * factor) else 0
    if factor <= 0 or rotary % 2 or not 2 <= rotary <= head_dim:
        raise UnsupportedModelError(
            key,
            f"{factor!r} of head_dim {head_dim} rotates {rotary} dimensions; an even number up to head_dim is needed",
        )
    return rotary


def _frequencies(theta: float, half: int, key: str) -> tuple[float, ...]:
    try:
        return tuple(float(theta ** (-i / half)) for i in range(half))
    except OverflowError:
        raise UnsupportedModelError(key, f"angles are not finite with {theta!r}") from None


def _yarn(keys: Keys, theta: float, base: tuple[float, ...]) -> RotaryPlan:
    for key in ("type", "rope_type"):
        if keys.take(key, str, "yarn") != "yarn":
            raise UnsupportedModelError(f"arch.yarn.{key}", "only 'yarn' is supported")
    factor = keys.positive("factor")
    original = keys.positive("original_max_position_embeddings")
    fast, slow = keys.positive("beta_fast", 32.0), keys.positive("beta_slow", 1.0)
    magnitude = _yarn_magnitude(keys, factor)
    truncate = keys.take("truncate", bool, True)
    if keys.take("rope_theta", float, theta) != theta:
        raise UnsupportedModelError("arch.yarn.rope_theta", f"expected {theta!r}, as arch.rope_theta says")
    keys.finish()

    half = len(base)

    def turns_at(turns: float) -> float:
        """The (fractional) pair index that makes so many turns over the original context."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = turns_at(fast), turns_at(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = max(high - low, 0.001)
    blended = []
    for i, frequency in enumerate(base):
        slowed = min(max((i - low) / span, 0.0), 1.0)
        blended.append(frequency / factor * slowed + frequency * (1 - slowed))
    return RotaryPlan(tuple(blended), magnitude)


def _yarn_magnitude(keys: Keys, factor: float) -> float:
    """The attention factor as given, or as the paper and its successors derive it."""

    def scaled(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    if keys.has("attention_factor"):
        return keys.positive("attention_factor")
    if keys.has("mscale") and keys.has("mscale_all_dim"):
        return scaled(keys.positive("mscale")) / scaled(keys.positive("mscale_all_dim"))
    return scaled(1.0)
