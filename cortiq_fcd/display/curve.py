"""Curves made of block characters: a sparkline in one row, a chart in several."""

from __future__ import annotations

import math

BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """The values in one row of at most `width` characters; the smallest is the lowest block, never blank."""
    points = squeeze(values, width)
    if not points:
        return ""
    low, span = _range(points)
    return "".join(BLOCKS[1 + round((value - low) / span * 7)] for value in points)


def chart(values: list[float], width: int, height: int) -> list[str]:
    """The values as rows of blocks, top row first, with the largest and the smallest value as labels at the left."""
    points = squeeze(values, width)
    if not points:
        return []
    low, span = _range(points)
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in points]
    rows = []
    for row in reversed(range(height)):
        rows.append("".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in eighths))
    labels = [f"{max(points):.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    return [f"{label:>{margin}} │{row}" for label, row in zip(labels, rows, strict=True)]


def squeeze(values: list[float], width: int) -> list[float]:
    """At most `width` values: means of equal pieces. Values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    pieces = (finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count))
    return [sum(piece) / len(piece) for piece in pieces]


def _range(points: list[float]) -> tuple[float, float]:
    low = min(points)
    return low, (max(points) - low) or 1.0
