"""One CMF file, opened: everything but the payloads is checked before anything is handed out.

Offsets in errors count from the start of the file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from cortiq_fcd.errors import CmfFormatError, ConfigError, ResourceError
from cortiq_fcd.io import layout
from cortiq_fcd.io.codecs import CODECS, PayloadError
from cortiq_fcd.io.hashing import hash64
from cortiq_fcd.io.header import parse_header
from cortiq_fcd.io.layout import DATA, DIRECTORY, HEADER, SECTIONS, DType, Envelope, Span

CHUNK_BYTES = 4 << 20  # of streamed reads
_RELEASE_BYTES = 1 << 20  # smaller payloads are left in the map

Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the directory. `offset_bytes` counts from the start of the file `path`; a `hash64` of 0 is none."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    hash64: int
    offset_bytes: int
    path: Path

    @property
    def span(self) -> Span:
        """The payload's place in the file."""
        return Span(self.offset_bytes, self.nbytes)


class CmfFile:
    """A validated file and its read-only map. `envelope`, `header`, `tensors` (directory order) and `dir_hash64` are
    facts of the file; payload bytes come as views (`view`) or as streamed chunks (`chunks`).
    """

    def __init__(self, path: Path) -> None:
        """Open and check; ConfigError if there is no such regular file, CmfFormatError if it is not a valid CMF."""
        self.path = path
        self._file = _open_regular(path)
        self._lock = threading.Lock()  # chunks() moves the file position
        try:
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            if self.size_bytes < layout.ENVELOPE_BYTES:
                _fail(path, "the file ends inside the envelope", 0, f"{layout.ENVELOPE_BYTES} bytes", self.size_bytes)
            self._map = _map(self._file, path)
            self._octets: Octets = np.frombuffer(self._map, np.uint8)
            self.envelope = _read_envelope(self._octets, path)
            span = self.envelope.spans[HEADER]
            data = self.view(span).tobytes()
            _check_hash(path, HEADER, span, data, self.envelope.header_hash64)
            self.header: dict[str, Any] = parse_header(data, path, span.offset_bytes)
            span = self.envelope.spans[DIRECTORY]
            data = self.view(span).tobytes()
            _check_hash(path, DIRECTORY, span, data, self.envelope.directory_hash64)
            self.dir_hash64 = hash64(data)
            self.tensors = _read_directory(data, self.envelope, path)
            for record in self.tensors.values():
                self._check_length(record)
        except BaseException:
            self.close()
            raise

    def view(self, span: Span) -> Octets:
        """The bytes of a span, as a read-only view of the map; ValueError after `close`."""
        if self._file.closed:
            raise ValueError(f"{self.path} is closed")
        return self._octets[span.offset_bytes : span.end_bytes]

    def chunks(self, span: Span) -> Iterator[memoryview]:
        """The bytes of a span in pieces of CHUNK_BYTES, through one buffer that each piece overwrites.

        Plain reads: unlike the map's, their pages do not count as memory of this process.
        """
        buffer = memoryview(bytearray(min(CHUNK_BYTES, span.nbytes)))
        for done in range(0, span.nbytes, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, span.nbytes - done)]
            self._read(span.offset_bytes + done, piece)
            yield piece

    def _read(self, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`; CmfFormatError if the file ends before that."""
        done = 0
        while done < len(out):
            with self._lock:
                self._file.seek(offset_bytes + done)
                got = self._file.readinto(out[done:])  # type: ignore[attr-defined]
            if not got:
                raise CmfFormatError(self.path, "the file became shorter while open", offset_bytes=offset_bytes + done)
            done += got

    def release(self, span: Span) -> None:
        """Let go of the memory of a span's mapped pages; the views stay valid and read them again when used."""
        if span.nbytes >= _RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            start = layout.align(span.offset_bytes, mmap.PAGESIZE)
            length = span.end_bytes // mmap.PAGESIZE * mmap.PAGESIZE - start
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Close the file. Views stay valid: the map lives as long as the last of them. May be called twice."""
        self._octets = np.empty(0, np.uint8)
        if hasattr(self, "_map"):
            with contextlib.suppress(BufferError):  # raised while a view is alive
                self._map.close()
        self._file.close()

    def _check_length(self, record: TensorRecord) -> None:
        """CmfFormatError unless the payload is as long as its dtype, shape and own header say."""
        payload = self.view(record.span)
        try:
            expected = CODECS[record.dtype].nbytes(record.shape, payload)
        except PayloadError as error:
            raise payload_fault(record, error) from None
        if expected != record.nbytes:
            what = f"wrong payload length for {record.dtype.label} {list(record.shape)}"
            _fail(self.path, what, record.offset_bytes, f"{expected} bytes", record.nbytes, record.name)


def payload_fault(record: TensorRecord, error: PayloadError) -> CmfFormatError:
    """The codec's complaint with the tensor, the file and the place in the file."""
    return CmfFormatError(
        record.path,
        f"{record.dtype.label} {list(record.shape)}: {error.what}",
        tensor=record.name,
        offset_bytes=record.offset_bytes + (error.offset_bytes or 0),
        expected=error.expected,
        got=error.got,
    )


def _fail(
    path: Path,
    what: str,
    offset_bytes: int,
    expected: object = None,
    got: object = None,
    tensor: str | None = None,
) -> NoReturn:
    raise CmfFormatError(path, what, tensor=tensor, offset_bytes=offset_bytes, expected=expected, got=got)


def _open_regular(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening it: opening a pipe would wait for a writer
            raise ConfigError(f"{path}: not a regular file", hint="give the path of a .cmf file")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="give the path of a .cmf file") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be opened ({error.strerror})") from None


def _map(file: BinaryIO, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ResourceError(f"{path}: can't be mapped into memory ({error.strerror})") from None


def _check_hash(path: Path, section: str, span: Span, data: bytes, recorded: int) -> None:
    if recorded and recorded != (actual := hash64(data)):
        hint = "the file is damaged: get it again from where it came"
        raise CmfFormatError(
            path,
            f"hash of the {section} section",
            offset_bytes=span.offset_bytes,
            expected=f"{recorded:016x}",
            got=f"{actual:016x}",
            hint=hint,
        )


def _read_envelope(octets: Octets, path: Path) -> Envelope:
    magic, version, _flags, features, *rest = layout.ENVELOPE.unpack(octets[: layout.ENVELOPE_BYTES].tobytes())
    if magic != layout.MAGIC:
        hint = "`cortiq-fcd convert` makes a CMF file of a HuggingFace directory"
        raise CmfFormatError(
            path, "not a CMF file", offset_bytes=0, expected=f"magic {layout.MAGIC!r}", got=repr(magic), hint=hint
        )
    if version != layout.VERSION:
        _fail(path, "unknown version", 0x04, layout.VERSION, version)
    unknown = features & ~layout.KNOWN_FEATURES
    if unknown:
        _fail(path, f"required_features bits that this reader does not know: {unknown:#x}", 0x0C)
    if not features & layout.FEATURE_DIRECTORY:
        _fail(path, "required_features lacks bit 0, the tensor directory", 0x0C)
    pairs = {name: Span(rest[2 * k], rest[2 * k + 1]) for k, name in enumerate(SECTIONS)}
    for k, (name, span) in enumerate(pairs.items()):
        _check_section(name, span, octets.size, path, layout.SECTION_FIELDS_AT + 16 * k)
    return Envelope(features, pairs, header_hash64=rest[12], directory_hash64=rest[13])


def _check_section(name: str, span: Span, size_bytes: int, path: Path, field_at: int) -> None:
    if span.end_bytes > size_bytes:
        what = f"the {name} section (offset {span.offset_bytes}, length {span.nbytes}) passes the end of the file"
        _fail(path, what, field_at, f"at most {size_bytes}", span.end_bytes)
    if not span.nbytes:
        if name in layout.REQUIRED_SECTIONS:
            _fail(path, f"the {name} section is missing", field_at)
        return
    if span.offset_bytes < layout.ENVELOPE_BYTES:
        _fail(path, f"the {name} section starts inside the envelope", field_at, "128 or more", span.offset_bytes)
    if name == DATA and span.offset_bytes % layout.DATA_ALIGN:
        _fail(
            path, "the data section is not aligned", field_at, f"a multiple of {layout.DATA_ALIGN}", span.offset_bytes
        )


def _read_directory(data: bytes, envelope: Envelope, path: Path) -> dict[str, TensorRecord]:
    at = envelope.spans[DIRECTORY].offset_bytes
    if len(data) < layout.DIRECTORY_HEAD.size:
        _fail(path, "the directory ends inside its head", at, "16 bytes or more", len(data))
    count, pool_off = layout.DIRECTORY_HEAD.unpack_from(data)
    records_end = layout.DIRECTORY_HEAD.size + count * layout.RECORD_BYTES
    if records_end > len(data):
        _fail(path, f"the directory of {count} records passes its end", at, f"at most {len(data)} bytes", records_end)
    if not records_end <= pool_off <= len(data):
        _fail(path, "name pool outside the directory", at + 8, f"{records_end} .. {len(data)}", pool_off)
    tensors: dict[str, TensorRecord] = {}
    for k in range(count):
        offset = layout.DIRECTORY_HEAD.size + k * layout.RECORD_BYTES
        record = _read_record(data, offset, pool_off, envelope, path)
        if record.name in tensors:
            _fail(path, "two tensors of this name", at + offset, tensor=record.name)
        tensors[record.name] = record
    return tensors


def _read_record(data: bytes, offset: int, pool_off: int, envelope: Envelope, path: Path) -> TensorRecord:
    at = envelope.spans[DIRECTORY].offset_bytes + offset
    name_off, name_len, dtype, ndim, *rest = layout.RECORD.unpack_from(data, offset)
    dims, (data_off, nbytes, recorded) = rest[: layout.MAX_NDIM], rest[layout.MAX_NDIM :]
    name_end = pool_off + name_off + name_len
    if name_end > len(data):
        _fail(path, "a tensor name passes the end of the directory", at, f"at most {len(data)}", name_end)
    try:
        name = data[name_end - name_len : name_end].decode("utf-8")
    except UnicodeDecodeError as error:
        _fail(path, f"a tensor name is not UTF-8 ({error.reason})", at)
    if dtype not in DType._value2member_map_:
        _fail(path, "unknown dtype", at + 6, "0 .. 16", dtype, name)
    if ndim > layout.MAX_NDIM:
        _fail(path, "too many dimensions", at + 7, f"at most {layout.MAX_NDIM}", ndim, name)
    shape = tuple(dims[:ndim])
    if any(dims[ndim:]):
        _fail(path, f"shape has sizes behind its {ndim} dimensions", at + 8, "zeros", dims[ndim:], name)
    if _extent(shape) > layout.MAX_ELEMENTS:
        _fail(path, "the shape's product overflows", at + 8, got=list(shape), tensor=name)
    if data_off % layout.TENSOR_ALIGN:
        _fail(path, "payload is not aligned", at + 32, f"a multiple of {layout.TENSOR_ALIGN}", data_off, name)
    section = envelope.spans[DATA]
    if data_off + nbytes > section.nbytes:
        what = f"payload (offset {data_off}, length {nbytes}) passes the end of the data section"
        _fail(path, what, at + 32, f"at most {section.nbytes}", data_off + nbytes, name)
    return TensorRecord(name, DType(dtype), shape, nbytes, recorded, section.offset_bytes + data_off, path)


def _extent(shape: tuple[int, ...]) -> int:
    """The product of the sizes that are not 0: numpy refuses a shape by it, even where a 0 makes the tensor empty."""
    extent = 1
    for size in shape:
        extent *= size or 1
    return extent
