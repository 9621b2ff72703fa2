"""One safetensors file, read without trust and without holding it.

    u64 n | n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...} | data, no gaps, to the end of file

Tensors come out in pieces through plain reads, so memory is what the caller keeps. bf16 has no numpy dtype: its bits
become the upper half of an f32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from cortiq_fcd.errors import CmfFormatError, ConfigError, NonFiniteWeightsError, UnsupportedModelError
from cortiq_fcd.io.hf.jsonfile import parse_object
from cortiq_fcd.io.layout import MAX_NDIM

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
CHUNK_BYTES = 4 << 20  # of a piece read at a time; a multiple of every item size
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
_EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file; `offset_bytes` counts from the start of the file. `dtype` is safetensors' name, as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
    path: Path

    def read(self) -> Weights:
        """The weights as f32, exact but for f64 (rounded to nearest).

        UnsupportedModelError for a dtype that holds no plain floats; NonFiniteWeightsError for an f64 beyond f32;
        CmfFormatError when the file became shorter. NaN and Inf come through.
        """
        return self._read(0, math.prod(self.shape)).reshape(self.shape)

    def read_rows(self, start: int, stop: int) -> Weights:
        """Rows `start` to `stop` (not included) of a matrix, as `read`."""
        cols = self.shape[1]
        return self._read(start * cols, stop * cols).reshape(-1, cols)

    def pieces(self, start_bytes: int = 0, stop_bytes: int | None = None) -> Iterator[memoryview]:
        """Bytes of the payload, counted from its start, through one buffer that each piece overwrites."""
        stop_bytes = self.nbytes if stop_bytes is None else stop_bytes
        buffer = memoryview(bytearray(min(CHUNK_BYTES, stop_bytes - start_bytes)))
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset_bytes + start_bytes)
                for at in range(start_bytes, stop_bytes, CHUNK_BYTES):
                    piece = buffer[: min(CHUNK_BYTES, stop_bytes - at)]
                    if file.readinto(piece) != len(piece):
                        raise CmfFormatError(self.path, "the file became shorter", tensor=self.name)
                    yield piece
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be read: {error.strerror}") from error

    def _read(self, start: int, stop: int) -> Weights:
        """The weights from one flat index to another."""
        if self.dtype not in FLOATS:
            hint = "convert the unquantised model" if self.dtype.startswith("F8") else ""
            raise UnsupportedModelError(self.name, f"{self.dtype} weights can't be read ({self.path.name})", hint=hint)
        weights = np.empty(stop - start, np.float32)
        item = np.dtype(FLOATS[self.dtype]).itemsize
        at = 0
        for piece in self.pieces(start * item, stop * item):
            block = np.frombuffer(piece, FLOATS[self.dtype])
            target = weights[at : at + block.size]
            if self.dtype == "BF16":
                np.left_shift(block, 16, out=target.view(np.uint32), dtype=np.uint32)
            else:
                with np.errstate(over="ignore", under="ignore"):
                    target[...] = block
                self._refuse_overflow(block, target, start + at)
            at += block.size
        return weights

    def _refuse_overflow(self, source: npt.NDArray[Any], target: Weights, at: int) -> None:
        if self.dtype == "F64":
            overflown = np.isinf(target) & np.isfinite(source)
            if overflown.any():
                where = at + int(np.flatnonzero(overflown)[0])
                what = f"the f64 at flat index {where} does not fit f32"
                raise NonFiniteWeightsError(self.path, what, tensor=self.name)


def read_directory(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order of their data. Every bound is checked; no payload is read.

    CmfFormatError for a file that is not valid safetensors, ConfigError for one that can't be opened.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header, data_at = _header(file, path, size)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    found = [_record(name, entry, path, data_at, size) for name, entry in header.items()]
    found.sort(key=lambda tensor: (tensor.offset_bytes, tensor.nbytes))
    at = data_at
    for tensor in found:
        if tensor.offset_bytes != at:
            _fail(path, "tensors overlap or leave a gap", at, at, tensor.offset_bytes, tensor.name)
        at += tensor.nbytes
    if at != size:
        _fail(path, "the data does not end with the file", at, at, size)
    return {tensor.name: tensor for tensor in found}


def _header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON and where the data begins."""
    head = file.read(8)
    if len(head) < 8:
        _fail(path, "the file ends inside the header's length", 0, "8 bytes", len(head))
    (length,) = struct.unpack("<Q", head)
    most = min(MOST_HEADER_BYTES, size - 8)
    if not 2 <= length <= most:
        _fail(path, "the header's length", 0, f"2 .. {most}", length)
    return parse_object(file.read(length), path, 8), 8 + length


def _record(name: str, entry: Any, path: Path, data_at: int, size: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        _fail(path, "a header entry without dtype, shape and data_offsets", 8, tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _whole_numbers(shape, 1 << 32) or len(shape) > MAX_NDIM:
        _fail(path, "shape", 8, f"at most {MAX_NDIM} sizes", str(shape)[:80], name)
    if not _whole_numbers(offsets, size + 1) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_at:
        _fail(path, "data_offsets", 8, f"two offsets up to {size - data_at}", str(offsets)[:80], name)
    nbytes = offsets[1] - offsets[0]
    item = _item_bytes(dtype)
    if item is not None and nbytes != math.prod(shape) * item:
        what = f"wrong length for {dtype} {list(shape)}"
        _fail(path, what, data_at + offsets[0], math.prod(shape) * item, nbytes, name)
    return StoredTensor(name, str(dtype), tuple(shape), data_at + offsets[0], nbytes, path)


def _item_bytes(dtype: Any) -> int | None:
    """Bytes an element; None for dtypes that are not known, which are only refused when a tensor is used."""
    if not isinstance(dtype, str):
        return None
    if dtype in FLOATS:
        return np.dtype(FLOATS[dtype]).itemsize
    return 1 if dtype in _EIGHT_BIT_FLOATS else _OTHER_BYTES.get(dtype)


def _whole_numbers(values: Any, limit: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < limit for value in values)


def _fail(
    path: Path, what: str, offset_bytes: int, expected: object = None, got: object = None, tensor: str | None = None
) -> NoReturn:
    raise CmfFormatError(
        path,
        f"not valid safetensors: {what}",
        tensor=tensor,
        offset_bytes=offset_bytes,
        expected=expected,
        got=got,
        hint="the file is damaged: get it again from where it came",
    )
