"""Moments of the optimizer in a file, for runs that have no memory for them: read and written piece by piece at every
step. Same operations in the same order, so the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from cortiq_fcd.errors import ResourceError
from cortiq_fcd.io.tensor_file import F32, StoredVector, open_tensors, write_tensors
from cortiq_fcd.model.adamw import SLICE

# Elements of a moment in memory at a time.
PIECE = 4 * SLICE
BUFFER_BYTES = 2 * PIECE * 4


class StoredMoments:
    """As `adamw.Moments`, in a safetensors file."""

    def __init__(self, path: Path, first: F32 | StoredVector, second: F32 | StoredVector, steps: int = 0) -> None:
        """Write the file. ResourceError if it can't be written, or read back."""
        self.steps = steps
        self._path = path
        file_hash = write_tensors(path, {"first": first, "second": second})
        try:
            stored = open_tensors(path, file_hash)
        except (OSError, ValueError) as error:
            raise _lost(path, error) from error
        self.first, self.second = stored["first"], stored["second"]

    def pieces(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of both moments on a device; what was changed is stored when the next is asked for.

        ResourceError if the file can't be read or written any more.
        """
        vectors = (self.first, self.second)
        buffers = [np.empty(min(PIECE, vector.count), np.float32) for vector in vectors]
        try:
            with self._path.open("r+b", buffering=0) as file:
                for start in range(0, self.first.count, PIECE):
                    spots = [vector.offset_bytes + 4 * start for vector in vectors]
                    held = [buffer[: self.first.count - start] for buffer in buffers]
                    for spot, part in zip(spots, held, strict=True):
                        _read(file, spot, part)
                    first, second = (torch.from_numpy(part).to(device) for part in held)
                    yield first, second
                    for spot, tensor in zip(spots, (first, second), strict=True):
                        _write(file, spot, tensor.cpu().numpy())
        except OSError as error:
            raise _lost(self._path, error) from error


def zeros(count: int) -> F32:
    """Moments before the first step; the system gives no memory for them as long as they are only read."""
    return np.zeros(count, np.float32)


def _read(file: BinaryIO, at: int, out: F32) -> None:
    file.seek(at)
    rest = out.data.cast("B")
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it became shorter")
        rest = rest[count:]


def _write(file: BinaryIO, at: int, values: F32) -> None:
    file.seek(at)
    rest = values.data.cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def _lost(path: Path, error: Exception) -> ResourceError:
    return ResourceError(
        f"{path}: the moments of the optimizer can't be kept there ({error})",
        hint="the same command goes on from the last checkpoint",
    )
