"""Where the time of the training loop went, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from cortiq_fcd.display import figures
from cortiq_fcd.display.report_rows import time_rows


def phase_table(timing: Mapping[str, float]) -> str:
    """A line a stage and phase, for the report's `timing`."""
    return "".join(
        f"{'  ' * row.depth + row.name:16}{figures.duration(row.seconds):>14}{row.share:8.1%}\n"
        for row in time_rows(timing)
    )
