"""Curves made of characters: a sparkline in one row, a line chart in several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_COLUMNS, CHART_ROWS = 96, 8
CHART_POINTS = 2 * CHART_COLUMNS  # braille has two dots a character
LABEL_COLUMNS = 10  # the frame, and the numbers beside it
LEAST_CHART_COLUMNS = 30


def sparkline(values: list[float], width: int) -> str:
    """The values in one row of at most `width` characters; the smallest is the lowest block, never blank."""
    points = squeeze(values, width)
    if not points:
        return ""
    low, span = _range(points)
    return "".join(BLOCKS[1 + round((value - low) / span * 7)] for value in points)


def line_chart(points: Sequence[tuple[float, float | None]], columns: int) -> list[str]:
    """A line through the points, in rows of at most `columns` characters; none for fewer than two points.

    Drawn by a library, and only decoration: if it fails, there is no chart.
    """
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(known) < 2 or columns < LEAST_CHART_COLUMNS:
        return []
    known = [(sum(x for x, _ in piece) / len(piece), sum(y for _, y in piece) / len(piece)) for piece in _pieces(known)]
    low, high = min(y for _, y in known), max(y for _, y in known)
    margin = 0.05 * (high - low) or abs(high) * 0.01 or 1.0
    try:
        from uniplot import plot_to_string

        drawn = plot_to_string(
            [y for _, y in known],
            xs=[x for x, _ in known],
            lines=True,
            color=False,
            character_set="braille",
            width=min(CHART_COLUMNS, columns - LABEL_COLUMNS),
            height=CHART_ROWS,
            line_length_hard_cap=columns,
            y_min=low - margin,
            y_max=high + margin,
            x_min=known[0][0],
            x_max=known[-1][0],
            y_gridlines=[],
            x_gridlines=[],
            y_labels=False,  # the library's are rounded until they are wrong: 25.39 is called 25
            x_labels=False,
            rounded_corners=True,
        )
    except Exception:
        return []
    return _labelled([line.rstrip() for line in drawn.splitlines() if line.strip()], known)


def _labelled(rows: list[str], points: list[tuple[float, float]]) -> list[str]:
    """The largest and the smallest value at the right, the first and the last place below."""
    values = [y for _, y in points]
    rows[1] += f" {max(values):.4g}"
    rows[-2] += f" {min(values):.4g}"
    first, last = f"{points[0][0]:.6g}", f"{points[-1][0]:.6g}"
    return [*rows, f" {first}{last:>{len(rows[0]) - 2 - len(first)}}"]


def _pieces(points: list[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    count = min(CHART_POINTS, len(points))
    yield from (points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count))


def squeeze(values: list[float], width: int) -> list[float]:
    """At most `width` values: means of equal pieces. Values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    pieces = (finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count))
    return [sum(piece) / len(piece) for piece in pieces]


def _range(points: list[float]) -> tuple[float, float]:
    low = min(points)
    return low, (max(points) - low) or 1.0
