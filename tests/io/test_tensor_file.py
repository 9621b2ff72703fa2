"""Files of f32 vectors: written and read back, and let go on the way."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.io import tensor_file
from cortiq_fcd.io.hashing import Bytes, Hasher
from cortiq_fcd.io.tensor_file import F32, StoredVector, open_tensors, write_tensors


def test_a_vector_is_let_go_as_soon_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a checkpoint must not live longer than its writing takes: memory estimates rely on it."""
    first, second = (np.full(1000, value, np.float32) for value in (1.0, 2.0))
    watched = weakref.ref(first)
    alive: list[bool] = []

    class Watching(Hasher):
        def update(self, data: Bytes) -> None:
            alive.append(watched() is not None)
            super().update(data)

    monkeypatch.setattr(tensor_file, "Hasher", Watching)
    vectors: dict[str, F32 | StoredVector] = {"first": first, "second": second}
    del first
    path = tmp_path / "two.safetensors"
    file_hash = write_tensors(path, vectors)
    assert alive == [True, True, False]  # head, first, second
    assert not vectors
    stored = open_tensors(path, file_hash)
    assert [float(piece.sum()) for vector in stored.values() for piece in vector.pieces()] == [1000, 2000]
