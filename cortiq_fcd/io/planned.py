"""A model file before it is written: what can be known of it without its payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from cortiq_fcd.io.reader import CmfModel, TensorRecord


@dataclass
class PlannedModel:
    """Stands where a `CmfModel` would, for everything that reads header, directory and sections alone.

    `path` is where the file will be. Records have no hash, no offset, and the least payload size that is possible.
    """

    path: Path
    header: dict[str, Any]
    required_features: int
    tensors: Mapping[str, TensorRecord]
    sections: Mapping[str, bytes]
    paths: tuple[Path, ...] = field(default=(), init=False)  # no file is there yet

    @property
    def arch(self) -> dict[str, Any]:
        """header["arch"]."""
        arch: dict[str, Any] = self.header["arch"]
        return arch

    def section(self, name: str) -> bytes | None:
        """ "masks", "vocab" or "index", None if absent."""
        return self.sections.get(name)

    def section_bytes(self, name: str) -> int:
        """Its size."""
        return len(self.sections.get(name, b""))


AnyModel: TypeAlias = CmfModel | PlannedModel
