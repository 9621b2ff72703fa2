"""Writing CMF files: a rewritten model (`write_model`) or a new one (`create_model`), one tensor in memory at a time.

The size of the directory depends on the names alone, so payloads go to the disk as they come, and envelope and
directory, which need their hashes, are filled in at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cortiq_fcd.errors import CmfFormatError, ConfigError, NonFiniteWeightsError, ResourceError
from cortiq_fcd.io import layout
from cortiq_fcd.io.atomic import check_free_space, check_output_path, write_atomically
from cortiq_fcd.io.codecs import CODECS, EncodeError, PayloadError
from cortiq_fcd.io.codecs.vbit import vbit_ro_bounds
from cortiq_fcd.io.container import TensorRecord
from cortiq_fcd.io.hashing import Hasher, hash64
from cortiq_fcd.io.header import dump_header, parse_header
from cortiq_fcd.io.layout import DATA, DIRECTORY, HEADER, OPTIONAL_SECTIONS, DirectoryEntry, DType, Envelope, Span
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.reader import CmfModel, require_hash
from cortiq_fcd.io.verify import verify_model

__all__ = [
    "WrittenFile",
    "check_free_space",
    "check_output_path",
    "create_model",
    "expected_bytes",
    "payload_bounds",
    "write_model",
]

_KEPT_FEATURES = layout.FEATURE_MASKS | layout.FEATURE_PER_VISIT_MASKS | layout.FEATURE_STANDALONE_SKILL

_SIZED_BY_PAYLOAD = layout.RESERVED_DTYPES | {DType.VBIT, DType.VBIT_RO, DType.Q1S, DType.Q1T}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WrittenFile:
    """What was written: `bytes` is the file's size, `dir_hash` 16 hex digits."""

    path: Path
    bytes: int
    dir_hash: str
    tensors_copied: int
    tensors_written: int


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write; `payload` gives its size in bytes and its pieces, and checks on the way what can be."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    payload: Callable[[], tuple[int, Iterable[memoryview]]]


def write_model(
    source: CmfModel,
    out: Path,
    *,
    header: dict[str, Any],
    replace: Mapping[str, tuple[DType, Array]],
    force: bool = False,
) -> WrittenFile:
    """Rewrite `source` to the file `out`, shards merged: tensors in `replace` are encoded, all others byte-copied.

    `header` is written as given, except that `shard` goes and `section_hashes` follow the sections. An array in
    `replace` holds weights of the tensor's shape, or, as uint8, a payload that is encoded already. Feature bit 2 is set
    iff q8_2f or vbit is present; the other bits, masks, vocab and index are the source's.

    Errors, all with `out` as it was: ConfigError and ResourceError as `check_output_path` and for a full disk;
    CmfFormatError for a tensor or section of the source without its recorded hash; NonFiniteWeightsError for NaN and
    Inf; ConfigError for weights that the dtype can't hold; ValueError for an unknown name or another shape.
    """
    unknown = replace.keys() - source.tensors.keys()
    if unknown:
        raise ValueError(f"not in the source: {sorted(unknown)}")
    tensors = []
    for name, record in source.tensors.items():
        if name in replace:
            dtype, array = replace[name]
            tensors.append(_encoded(out, name, dtype, record.shape, partial(_same, array)))
        else:
            tensors.append(_Tensor(name, record.dtype, record.shape, partial(_copied, source, record)))
    sections = {name: data for name in OPTIONAL_SECTIONS if (data := source.section(name)) is not None}
    new_dtypes = {name: dtype for name, (dtype, _) in replace.items()}
    target = check_output_path(source.paths, out, force)
    check_free_space(target, expected_bytes(source, header=header, replace=new_dtypes))
    features = source.required_features & _KEPT_FEATURES
    size, dir_hash = _write(target, _final_header(header, sections, out), features, tensors, sections)
    return WrittenFile(Path(out), size, dir_hash, len(tensors) - len(replace), len(replace))


def create_model(
    out: Path,
    *,
    header: dict[str, Any],
    tensors: Iterable[tuple[str, DType, tuple[int, ...], Callable[[], Array]]],
    vocab: bytes | None = None,
    masks: bytes | None = None,
    index: bytes | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write a new model to the file `out`. A tensor is (name, dtype, shape, function that gives its array).

    The functions are called one after the other, each array is dropped once it is written. Arrays and errors are as in
    `write_model`; `header` needs format, version and arch. The free space is compared with the dtypes whose size the
    shape tells; that the others do not fit is met while writing, and leaves nothing behind.
    """
    plan = [_encoded(out, name, dtype, tuple(shape), produce) for name, dtype, shape, produce in tensors]
    if len({tensor.name for tensor in plan}) < len(plan):
        raise ValueError("two tensors of the same name")
    given = {layout.MASKS: masks, layout.VOCAB: vocab, layout.INDEX: index}
    sections = {name: data for name, data in given.items() if data}
    target = check_output_path([], out, force)
    check_free_space(
        target, sum(_encoded_bytes(t.name, t.dtype, t.shape) for t in plan if t.dtype not in _SIZED_BY_PAYLOAD)
    )
    features = layout.FEATURE_MASKS if masks else 0
    size, dir_hash = _write(target, _final_header(header, sections, out), features, plan, sections)
    return WrittenFile(Path(out), size, dir_hash, 0, len(plan))


def expected_bytes(source: AnyModel, *, header: dict[str, Any], replace: Mapping[str, DType]) -> int:
    """Size in bytes of what `write_model` writes, for tensors replaced by these dtypes.

    Exact for the header given; with vbit_ro among the dtypes an upper bound (its widths come from the weights).
    """
    sections = {name: source.section_bytes(name) for name in OPTIONAL_SECTIONS}
    placeholder = {name: b"0" for name, nbytes in sections.items() if nbytes}
    at = layout.ENVELOPE_BYTES + len(_final_header(header, placeholder, source.path))
    at += layout.directory_bytes(list(source.tensors))
    data_at = layout.align(at, layout.DATA_ALIGN)
    for name, record in source.tensors.items():
        nbytes = _encoded_bytes(name, replace[name], record.shape) if name in replace else record.nbytes
        at = _start(at, data_at, nbytes) + nbytes
    return at + sum(sections.values())


def payload_bounds(dtype: DType, shape: tuple[int, ...]) -> tuple[int, int]:
    """The least and the most bytes of a payload: they differ for vbit_ro. PayloadError when it can't hold the shape."""
    if dtype == DType.VBIT_RO:
        return vbit_ro_bounds(shape)
    nbytes = CODECS[dtype].nbytes(shape)
    return nbytes, nbytes


def _encoded_bytes(name: str, dtype: DType, shape: tuple[int, ...]) -> int:
    """Payload size; for vbit_ro the largest possible. ConfigError when the dtype can't hold the shape."""
    try:
        return payload_bounds(dtype, shape)[1]
    except PayloadError as error:
        raise _shape_fault(name, dtype, shape, error) from None


def _shape_fault(name: str, dtype: DType, shape: tuple[int, ...], error: PayloadError) -> ConfigError:
    what = f"tensor {name!r} {list(shape)} can't be {dtype.label}: {error.what}"
    return ConfigError(what, hint="f32, f16 and bf16 hold any shape")


def _same(array: Array) -> Array:
    return array


def _encoded(out: Path, name: str, dtype: DType, shape: tuple[int, ...], produce: Callable[[], Array]) -> _Tensor:
    def payload() -> tuple[int, Iterable[memoryview]]:
        encoded = _encode(out, name, dtype, shape, produce())
        return encoded.size, [encoded.data]

    return _Tensor(name, dtype, shape, payload)


def _encode(out: Path, name: str, dtype: DType, shape: tuple[int, ...], array: Array) -> Array:
    codec = CODECS[dtype]
    try:
        if array.dtype == np.uint8:
            octets = np.ascontiguousarray(array).reshape(-1)
            if octets.size != codec.nbytes(shape, octets):
                raise ValueError(f"{name}: {octets.size} bytes are no {dtype.label} {shape}")
            return octets
        if array.shape != shape or codec.encode is None:
            raise ValueError(f"{name}: can't encode an array {array.shape} as {dtype.label} {shape}")
        return codec.encode(np.asarray(array, np.float32))
    except EncodeError as error:
        raise _encode_fault(out, name, dtype, error) from None
    except PayloadError as error:
        raise _shape_fault(name, dtype, shape, error) from None


def _encode_fault(out: Path, name: str, dtype: DType, error: EncodeError) -> CmfFormatError | ConfigError:
    if error.nonfinite:
        return NonFiniteWeightsError(out, f"not written: {error.what}", tensor=name)
    return ConfigError(f"{out}: tensor {name!r}: {error.what}", hint=f"save as f32 or bf16 instead of {dtype.label}")


def _copied(source: CmfModel, record: TensorRecord) -> tuple[int, Iterable[memoryview]]:
    return record.nbytes, _checked_chunks(source, record)


def _checked_chunks(source: CmfModel, record: TensorRecord) -> Iterator[memoryview]:
    """The payload as it is in the source; CmfFormatError behind the last piece if its hash is not the recorded one."""
    hasher = Hasher()
    for piece in source.chunks(record.name):
        hasher.update(piece)
        yield piece
    require_hash(record, hasher.digest())


def _final_header(header: dict[str, Any], sections: Mapping[str, bytes], out: Path) -> bytes:
    """The header's bytes: the given keys in their order, without `shard`, `section_hashes` as the sections are."""
    final = {key: value for key, value in header.items() if key != "shard"}
    kept = {key: text for key, text in (header.get("section_hashes") or {}).items() if key not in OPTIONAL_SECTIONS}
    now = {name: f"{hash64(data):016x}" for name, data in sections.items()}
    old = header.get("section_hashes") or {}
    if now or old:
        in_order = {key: kept.get(key, now.get(key)) for key in old if key in kept or key in now}
        final["section_hashes"] = {**in_order, **now}
    data = dump_header(final)
    parse_header(data, out, layout.ENVELOPE_BYTES)  # what we write, we can read
    return data


def _write(
    target: Path, header: bytes, features: int, tensors: Sequence[_Tensor], sections: Mapping[str, bytes]
) -> tuple[int, str]:
    """The file's size and directory hash."""

    def verify(partial: Path) -> None:
        faults = [finding for finding in verify_model(partial) if finding.kind == "fault"]
        if faults:
            raise ResourceError(
                f"{target}: what was read back is not what was written ({faults[0].where}: {faults[0].message})",
                hint="check the disk; the previous file, if there was one, is untouched",
            )

    return write_atomically(target, lambda file: _fill(file, header, features, tensors, sections), verify)


def _fill(
    file: BinaryIO, header: bytes, features: int, tensors: Sequence[_Tensor], sections: Mapping[str, bytes]
) -> tuple[int, str]:
    directory_at = layout.ENVELOPE_BYTES + len(header)
    at = directory_at + layout.directory_bytes([tensor.name for tensor in tensors])
    spans = {HEADER: Span(layout.ENVELOPE_BYTES, len(header)), DIRECTORY: Span(directory_at, at - directory_at)}
    data_at = layout.align(at, layout.DATA_ALIGN)
    _write_zeros(file, at)
    entries = []
    for tensor in tensors:
        entry, at = _write_tensor(file, tensor, at, data_at)
        entries.append(entry)
    if at > data_at:
        spans[DATA] = Span(data_at, at - data_at)
    for name in OPTIONAL_SECTIONS:
        if name in sections:
            spans[name] = Span(at, len(sections[name]))
            file.write(sections[name])
            at += len(sections[name])
    directory = layout.pack_directory(entries)
    features |= layout.FEATURE_DIRECTORY
    if any(tensor.dtype in layout.TWO_FIELD_DTYPES for tensor in tensors):
        features |= layout.FEATURE_TWO_FIELD
    file.seek(0)
    file.write(Envelope(features, spans, hash64(header), hash64(directory)).pack() + header + directory)
    return at, f"{hash64(directory):016x}"


def _write_tensor(file: BinaryIO, tensor: _Tensor, at: int, data_at: int) -> tuple[DirectoryEntry, int]:
    """Append one tensor to the `at` bytes written so far; its directory entry, and the bytes written then."""
    nbytes, pieces = tensor.payload()
    start = _start(at, data_at, nbytes)
    _write_zeros(file, start - at)
    hasher = Hasher()
    for piece in pieces:
        hasher.update(piece)
        file.write(piece)
    offset_bytes = start - data_at if nbytes else 0  # an empty tensor is nowhere, not behind the section's end
    return DirectoryEntry(
        tensor.name, tensor.dtype, tensor.shape, offset_bytes, nbytes, hasher.digest()
    ), start + nbytes


def _start(at: int, data_at: int, nbytes: int) -> int:
    """Where in the file a payload goes when `at` bytes are written: aligned inside the data section."""
    if not nbytes:
        return at
    return data_at + layout.align(max(0, at - data_at), layout.tensor_alignment(nbytes))


def _write_zeros(file: BinaryIO, nbytes: int) -> None:
    while nbytes > 0:
        nbytes -= file.write(bytes(min(nbytes, 1 << 20)))
