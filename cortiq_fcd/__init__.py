"""Hand-written polish for O(1)-attention language models in CMF files.

from cortiq_fcd import PolishConfig, polish
report = polish("in.cmf", "out.cmf", PolishConfig())
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take longer than all of this
if TYPE_CHECKING:
    from pathlib import Path

    from cortiq_fcd.events import Listener
    from cortiq_fcd.stages.config import PolishConfig as PolishConfig
    from cortiq_fcd.stages.report import Report

__all__ = ["PolishConfig", "polish"]


def polish(
    source: str | Path, out: str | Path, config: PolishConfig | None = None, listener: Listener | None = None
) -> Report:
    """Polish the CMF file `source` into `out` and return the report. Raises `cortiq_fcd.errors.CortiqError`."""
    from pathlib import Path

    from cortiq_fcd.events import ignore
    from cortiq_fcd.stages import pipeline
    from cortiq_fcd.stages.config import PolishConfig

    return pipeline.run(Path(source), Path(out), config or PolishConfig(), listener or ignore)


def __getattr__(name: str) -> object:
    # Imported on first use: `import cortiq_fcd` must stay quick, and must not import torch.
    if name == "PolishConfig":
        from cortiq_fcd.stages.config import PolishConfig

        return PolishConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
