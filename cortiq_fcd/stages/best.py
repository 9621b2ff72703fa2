"""Where the best state of a polish is kept: in memory, or in OUT.partial when memory is short."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.io.tensor_file import StoredVector, open_tensors, write_tensors
from cortiq_fcd.model.vectors import Held, read_vector
from cortiq_fcd.stages.checkpoint_folder import BEST


class Best(Protocol):
    """Keeps one vector, null at first."""

    @property
    def vector(self) -> Held | None:
        """What is kept."""

    def keep(self, values: Held | None, step: int) -> None:
        """Keep a copy of these values, of this step, in place of others."""


class BestInMemory:
    """A copy in memory."""

    def __init__(self) -> None:
        self.vector: Tensor | None = None

    def keep(self, values: Held | None, step: int) -> None:
        """See `Best`. Raises what reading stored values does."""
        self.vector = None  # frees the old one before the new one is made
        if values is not None:
            self.vector = values.clone() if isinstance(values, Tensor) else read_vector(values)


class BestOnDisk:
    """A file in the checkpoints' folder, `best-000025.safetensors`; its hash is checked before it is used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._hash = ""

    @property
    def vector(self) -> StoredVector | None:
        """See `Best`. ResourceError if the file is no longer what was written."""
        if self._path is None:
            return None
        try:
            return open_tensors(self._path, self._hash)["masters"]
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"{self._path}: the best state can't be read back ({error})",
                hint="the same command goes on from the last checkpoint",
            ) from error

    def keep(self, values: Held | None, step: int) -> None:
        """See `Best`. ResourceError if it can't be written."""
        path = None
        if values is not None:
            path = self._folder / f"best-{step:06d}.safetensors"
            held = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
            self._hash = write_tensors(path, {"masters": held})
        self._path = path
        for old in self._folder.glob(BEST):
            if old != path:
                with contextlib.suppress(OSError):
                    old.unlink()
