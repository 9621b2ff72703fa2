"""Vectors in a safetensors file: written as they lie in memory, hashed on the way, and read back piece by piece.

    u64 length of the JSON | JSON {name: {dtype, shape, data_offsets}} | the vectors, one after the other

Written here and not by the library, because that makes one more copy of everything and does not sync.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.io.hashing import Hasher

F32 = npt.NDArray[np.float32]
_PIECE_BYTES = 1 << 22
_MOST_HEADER_BYTES = 1 << 16


class InPieces(Protocol):
    """A vector of `count` numbers that comes in pieces, each valid until the next one."""

    @property
    def count(self) -> int:
        """How many numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""

    def pieces(self) -> Iterator[F32]:
        """The numbers."""


@dataclass(frozen=True)
class StoredVector:
    """`count` f32 numbers in a file, from `offset_bytes` on."""

    path: Path
    offset_bytes: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return self.count * 4

    def pieces(self) -> Iterator[F32]:
        """The numbers, in one buffer that each piece overwrites. Raises OSError, or ValueError if they are gone."""
        buffer = np.empty(min(self.nbytes, _PIECE_BYTES), np.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            for start in range(0, self.nbytes, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, self.nbytes - start)]
                if file.readinto(piece.data) != piece.size:
                    raise ValueError(f"{self.path.name} became shorter")
                yield piece.view(np.float32)


def write_tensors(path: Path, vectors: dict[str, F32 | InPieces]) -> str:
    """Write contiguous f32 vectors, from memory or piece by piece, whole or not at all.

    `vectors` is emptied: each is let go as soon as it is written.

    Returns hash64 of the file, 16 hex digits. Raises ResourceError when it can't be written, and as `pieces` does.
    """
    return write_atomically(path, lambda file: _fill(file, vectors))


def open_tensors(path: Path, file_hash: str) -> dict[str, StoredVector]:
    """The vectors of a file with this hash. Raises ValueError for a damaged file, OSError for an unreadable one."""
    hasher = Hasher()
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head = file.read(min(size, _MOST_HEADER_BYTES))
        file.seek(0)
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    if f"{hasher.digest():016x}" != file_hash:
        raise ValueError(f"its hash is {hasher.digest():016x}, expected {file_hash}")
    try:
        entries = {name: entry for name, entry in json.loads(head).items() if name != "__metadata__"}
        spans = {name: entry["data_offsets"] for name, entry in entries.items() if entry["dtype"] == "F32"}
        return {name: StoredVector(path, 8 + size + a, (b - a) // 4) for name, (a, b) in spans.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not understood: {error!r}") from error


def _fill(file: BinaryIO, vectors: dict[str, F32 | InPieces]) -> str:
    hasher = Hasher()
    for piece in _contents(vectors):
        for start in range(0, piece.size, _PIECE_BYTES):
            part = piece[start : start + _PIECE_BYTES]
            hasher.update(part)
            file.write(part.data)
    return f"{hasher.digest():016x}"


def _contents(vectors: dict[str, F32 | InPieces]) -> Iterator[npt.NDArray[np.uint8]]:
    yield np.frombuffer(_head(vectors), np.uint8)
    for name in list(vectors):
        vector = vectors.pop(name)
        if not isinstance(vector, np.ndarray):
            for piece in vector.pieces():
                yield piece.view(np.uint8)
        else:
            yield vector.reshape(-1).view(np.uint8)


def _head(vectors: Mapping[str, F32 | InPieces]) -> bytes:
    entries, at = {}, 0
    for name, vector in vectors.items():
        shape = list(vector.shape) if isinstance(vector, np.ndarray) else [vector.count]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + vector.nbytes]}
        at += vector.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
