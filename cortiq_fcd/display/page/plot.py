"""Line plots as coordinates: what an SVG needs to draw steps against values. The page's template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 388, 12, 192
EDGES = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}  # of the plotted area
MOST_POINTS = 600
SMOOTHED_SHARE = 12  # a smooth line is the mean over one part in so many

Point = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, with its text."""

    at: float
    label: str


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with; `kind` is its class in the style sheet."""

    at: float
    label: str
    kind: str


@dataclass(frozen=True)
class Dot:
    """A single value; `kind` is its class in the style sheet."""

    x: float
    y: float
    label: str
    kind: str


@dataclass(frozen=True)
class Plot:
    """Everything to draw, in units of the view box. `spoken` says in words what is seen."""

    title: str
    spoken: str
    fine: str  # path of every value
    smooth: str  # path of the means; empty where every value is drawn boldly
    window: int  # values in a mean
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    levels: Sequence[Level] = ()
    dots: Sequence[Dot] = ()
    below: str = ""  # what lies below the plotted range


def steps_plot(title: str, points: Sequence[Point]) -> Plot | None:
    """A noisy value of every step, with its moving mean; null for fewer than two values."""
    if len(points) < 2:
        return None
    window = max(1, len(points) // SMOOTHED_SHARE)
    smooth = _moving_mean(points, window)
    frame = _Frame.around(points)
    spoken = f"{title}: {points[0][1]:.4g} at step {points[0][0]:g}, {points[-1][1]:.4g} at step {points[-1][0]:g}"
    return Plot(
        title=title,
        spoken=spoken,
        fine=frame.path(_thinned(points)),
        smooth=frame.path(_thinned(smooth)) if window > 1 else "",
        window=window,
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
    )


def checkpoints_plot(
    title: str, points: Sequence[Point], kinds: Sequence[str], levels: Sequence[tuple[float, str, str]]
) -> Plot | None:
    """A value of every checkpoint, a dot each. Levels below the range of the values are named, not drawn."""
    if len(points) < 2:
        return None
    low, high = min(y for _, y in points), max(y for _, y in points)
    room = (high - low) or abs(high) * 0.01 or 1.0
    inside = [level for level in levels if low - room <= level[0] <= high + room]
    frame = _Frame.around([*points, *((points[0][0], level[0]) for level in inside)])
    outside = [f"{label} {value:.4g}" for value, label, _ in levels if value < low - room]
    spoken = f"{title}: {points[0][1]:.4g} at step {points[0][0]:g}, {points[-1][1]:.4g} at step {points[-1][0]:g}"
    return Plot(
        title=title,
        spoken=spoken,
        fine="",
        smooth=frame.path(points),
        window=1,
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
        levels=[Level(frame.y(value), f"{label} {value:.4g}", kind) for value, label, kind in inside],
        dots=[
            Dot(frame.x(x), frame.y(y), f"step {x:g}: {y:.4g}", kind)
            for (x, y), kind in zip(points, kinds, strict=True)
        ],
        below=", ".join(outside),
    )


@dataclass(frozen=True)
class _Frame:
    """The range of the values, and the way from a value to a coordinate."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, points: Sequence[Point]) -> _Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        margin = 0.06 * (max(ys) - min(ys)) or abs(max(ys)) * 0.01 or 1.0
        least = max(1.0, abs(min(xs)) * 1e-9)  # one more than a large number can be the same number
        return cls(min(xs), max(max(xs), min(xs) + least), min(ys) - margin, max(ys) + margin)

    def x(self, value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - self.x_low) / (self.x_high - self.x_low), 1)

    def y(self, value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - self.y_low) / (self.y_high - self.y_low), 1)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)

    def x_ticks(self) -> list[Tick]:
        values = [value for value in ticks(self.x_low, self.x_high, 5) if value == round(value)]
        return [Tick(self.x(value), f"{value:,.0f}") for value in values]

    def y_ticks(self) -> list[Tick]:
        return [Tick(self.y(value), f"{value:.6g}") for value in ticks(self.y_low, self.y_high, 4)]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]


def _moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Means over `window` neighbours, fewer at both ends."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    means = []
    for i, (x, _) in enumerate(points):
        a, b = max(0, i - window // 2), min(len(points), i + window // 2 + 1)
        means.append((x, (sums[b] - sums[a]) / (b - a)))
    return means


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS points: means of equal pieces."""
    count = min(len(points), MOST_POINTS)
    pieces = [points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)]
    return [(sum(x for x, _ in piece) / len(piece), sum(y for _, y in piece) / len(piece)) for piece in pieces]
