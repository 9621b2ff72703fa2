"""Header keys and tensors that remember which were consumed: what is left over could change the function: refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from cortiq_fcd.errors import UnsupportedModelError

# Keys that do not change what the forward computes.
INFORMATIONAL_KEYS: Mapping[str, str] = {
    "arch_name": "a label",
    "max_position_embeddings": "a limit for callers; rotary angles need no table size",
    "intermediate_size": "FFN widths are read from the tensors' shapes, layer by layer",
    "sliding_window_pattern": "layer_types says which layers slide",
}

# Keys that may be present as long as they ask for nothing; any other value is refused by name.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attn_v_norm": (False,),
    "mla": ({},),
    "mtp": ({},),
    "moe": ({},),
    "g3n": ({},),
    "head_clusters": ([], {}),
}

LARGEST_SIZE = 2**32 - 1
# Wider than any model's, and their products, squares and roots are still far from the ends of f32.
LEAST_NUMBER, LARGEST_NUMBER = 1e-12, 1e12
_RANGE = f"of {LEAST_NUMBER:g} to {LARGEST_NUMBER:g}"


class Shaped(Protocol):
    """Something with a shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first."""


class Keys:
    """A JSON object of the header; null values count as absent."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._left = {key: value for key, value in values.items() if value is not None}
        self._path = path

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, which must be of the JSON type `kind`; required unless there is a default."""
        value = self._left.pop(key, default)
        if kind is float:
            value = _as_float(value)
        if value is None or type(value) is not kind:
            raise UnsupportedModelError(f"{self._path}.{key}", f"expected {kind.__name__}, got {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number that the format could have as a tensor's size."""
        value: int = self.take(key, int, default)
        if not 1 <= value <= LARGEST_SIZE:
            raise UnsupportedModelError(f"{self._path}.{key}", f"expected a positive size, got {str(value)[:80]}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number that f32 can compute with."""
        value: float = self.take(key, float, default)
        if not LEAST_NUMBER <= value <= LARGEST_NUMBER:
            raise UnsupportedModelError(f"{self._path}.{key}", f"expected a positive number {_RANGE}, got {value!r}")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return key in self._left

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers that f32 can compute with; empty when absent."""
        values = [_as_float(value) for value in self.take(key, list, [])]
        for value in values:
            if type(value) is not float or not LEAST_NUMBER <= value <= LARGEST_NUMBER:
                raise UnsupportedModelError(f"{self._path}.{key}", f"expected positive numbers {_RANGE}, got {value!r}")
        return tuple(values)

    def finish(self) -> None:
        """Refuse the first key that nobody took, unless it says nothing."""
        for key, value in self._left.items():
            if key in INFORMATIONAL_KEYS:
                continue
            neutral = NEUTRAL_VALUES.get(key)
            if neutral is None:
                raise UnsupportedModelError(
                    f"{self._path}.{key}",
                    f"not supported (value {str(value)[:80]}), and leaving it out would compute another model",
                )
            if not any(type(value) is type(n) and value == n for n in neutral):
                raise UnsupportedModelError(
                    f"{self._path}.{key}", f"only {neutral[0]!r} is supported, got {str(value)[:80]}"
                )


def _as_float(value: Any) -> Any:
    """A whole number as a float, infinite if it is too large for one; anything else as it is."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


class Tensors:
    """The tensor directory."""

    def __init__(self, tensors: Mapping[str, Shaped]) -> None:
        self._tensors = tensors
        self.used: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        """Whether the file has the tensor."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, () when the file has none of that name: for sizes that only the shape tells."""
        return tuple(self._tensors[name].shape) if name in self._tensors else ()

    def take(self, name: str, *shape: int) -> str:
        """Consume a tensor that must be there with this shape."""
        if name not in self._tensors:
            raise UnsupportedModelError(
                name, f"the model needs this tensor (shape {list(shape)}) and the file has none"
            )
        if self.shape(name) != shape:
            raise UnsupportedModelError(name, f"expected shape {list(shape)}, got {list(self.shape(name))}")
        self.used[name] = shape
        return name

    def maybe(self, name: str, *shape: int) -> str | None:
        """Consume a tensor that may be missing."""
        return self.take(name, *shape) if self.has(name) else None

    def finish(self) -> None:
        """Refuse the first tensor that nobody took; skill overlays are not part of the forward."""
        for name in self._tensors:
            if name not in self.used and not name.startswith("skill."):
                raise UnsupportedModelError(
                    name, "a tensor that this forward does not use; leaving it out would compute another model"
                )
