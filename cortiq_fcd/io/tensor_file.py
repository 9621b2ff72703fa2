"""Arrays in a safetensors file: written as they lie in memory, hashed on the way, and read back only if the hash holds.

    u64 length of the JSON | JSON {name: {dtype, shape, data_offsets}} | the arrays, one after the other

Written here and not by the library, because that makes one more copy of everything and does not sync.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.io.hashing import Hasher

F32 = npt.NDArray[np.float32]
_PIECE_BYTES = 1 << 22


def write_tensors(path: Path, arrays: Mapping[str, F32]) -> str:
    """Write contiguous f32 arrays, whole or not at all; returns hash64 of the file, 16 hex digits.

    Raises ResourceError when it can't be written.
    """
    return write_atomically(path, lambda file: _fill(file, arrays))


def read_tensors(path: Path, file_hash: str) -> dict[str, F32]:
    """The arrays of a file with this hash. Raises ValueError for a damaged file, OSError for one that can't be read."""
    hasher = Hasher()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    if f"{hasher.digest():016x}" != file_hash:
        raise ValueError(f"its hash is {hasher.digest():016x}, expected {file_hash}")
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in list(tensors.keys())}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _fill(file: BinaryIO, arrays: Mapping[str, F32]) -> str:
    hasher = Hasher()
    for piece in (
        np.frombuffer(_head(arrays), np.uint8),
        *(array.reshape(-1).view(np.uint8) for array in arrays.values()),
    ):
        for start in range(0, piece.size, _PIECE_BYTES):
            part = piece[start : start + _PIECE_BYTES]
            hasher.update(part)
            file.write(part.data)
    return f"{hasher.digest():016x}"


def _head(arrays: Mapping[str, F32]) -> bytes:
    entries, at = {}, 0
    for name, array in arrays.items():
        entries[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
