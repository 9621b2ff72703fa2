"""A model: one CMF file, or the shards of one, merged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cortiq_fcd.errors import CmfFormatError
from cortiq_fcd.io.codecs import CODECS, PayloadError
from cortiq_fcd.io.container import CmfFile, TensorRecord, payload_fault
from cortiq_fcd.io.hashing import Hasher, hash64
from cortiq_fcd.io.header import section_hash

__all__ = ["CmfModel", "TensorRecord", "open_model"]

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.cmf", re.DOTALL)


def open_model(path: str | Path) -> CmfModel:
    """Open a model by its path, or by the path of any of its shards; use it as a context manager.

    ConfigError when there is no such file; CmfFormatError when a header, a hash of header or directory, a bound or the
    set of shards is wrong. Payloads are not read, except for the size fields at the head of vbit, q1s and q1t ones.
    """
    return CmfModel(Path(path))


class CmfModel:
    """Header, tensors and sections of a model; the bytes stay in the files until asked for."""

    path: Path  # as opened
    paths: tuple[Path, ...]  # every file, shard 1 first
    header: dict[str, Any]  # shard 1's
    required_features: int  # of all files
    tensors: dict[str, TensorRecord]  # directory order, shard after shard
    dir_hash: str  # shard 1's, 16 hex digits
    bytes_total: int  # file sizes

    def __init__(self, path: Path) -> None:
        """See `open_model`."""
        self.path = path
        self.files = _open_shards(path)
        try:
            first = self.files[0]
            self.paths = tuple(file.path for file in self.files)
            self.header = first.header
            self.dir_hash = f"{first.dir_hash64:016x}"
            self.bytes_total = sum(file.size_bytes for file in self.files)
            self.required_features = 0
            self.tensors = {}
            self._file_of: dict[str, CmfFile] = {}
            for file in self.files:
                self.required_features |= file.envelope.features
                self._merge(file)
        except BaseException:
            self.close()
            raise

    @property
    def arch(self) -> dict[str, Any]:
        """header["arch"]."""
        arch: dict[str, Any] = self.header["arch"]
        return arch

    def section(self, name: str) -> bytes | None:
        """A copy of "masks", "vocab" or "index" (shard 1's), None if absent; CmfFormatError if its hash is wrong."""
        first = self.files[0]
        span = first.envelope.spans[name]
        if not span.nbytes:
            return None
        data = first.view(span).tobytes()
        recorded = section_hash(self.header, name)
        if recorded is not None and recorded != hash64(data):
            raise _hash_fault(first.path, f"hash of the {name} section", span.offset_bytes, recorded, hash64(data))
        return data

    def section_bytes(self, name: str) -> int:
        """Size of a section in bytes, 0 if absent."""
        return self.files[0].envelope.spans[name].nbytes

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The payload as a read-only view of the mapped file; KeyError for an unknown name. It outlives `close`."""
        return self._file_of[name].view(self.tensors[name].span)

    def chunks(self, name: str, *, check_hash: bool = False) -> Iterator[memoryview]:
        """The payload in pieces, read into one buffer that each piece overwrites: for copying with little memory.

        `check_hash`: CmfFormatError after the last piece if the payload does not have its recorded hash.
        """
        record, hasher = self.tensors[name], Hasher()
        check_hash = check_hash and record.hash64 != 0
        for piece in self._file_of[name].chunks(record.span):
            if check_hash:
                hasher.update(piece)
            yield piece
        if check_hash:
            require_hash(record, hasher.digest())

    def decode(self, name: str, *, check_hash: bool = True) -> npt.NDArray[np.float32]:
        """The weights, a fresh array of the tensor's shape; KeyError for an unknown name.

        CmfFormatError when the payload does not have its recorded hash, breaks a rule of its dtype, or the dtype is
        reserved. NaN and Inf in the payload come through.
        """
        record = self.tensors[name]
        payload = self.raw(name)
        if check_hash and record.hash64:
            require_hash(record, hash64(payload))
        try:
            return self.decode_payload(name, payload)
        finally:
            self._file_of[name].release(record.span)

    def decode_payload(self, name: str, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The weights of a payload that was read by `chunks`, a fresh array; errors as `decode`, hash apart."""
        record = self.tensors[name]
        try:
            return CODECS[record.dtype].decode(payload, record.shape)
        except PayloadError as error:
            raise payload_fault(record, error) from None

    def close(self) -> None:
        """Close the files; may be called twice. Views that `raw` handed out stay valid, decoded arrays are copies."""
        for file in self.files:
            file.close()

    def __enter__(self) -> CmfModel:
        """The model itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _merge(self, file: CmfFile) -> None:
        for name, record in file.tensors.items():
            if name in self.tensors:
                other = self.tensors[name].path.name
                raise CmfFormatError(
                    file.path,
                    f"a tensor of this name is also in {other}",
                    tensor=name,
                    offset_bytes=record.offset_bytes,
                )
            self.tensors[name] = record
            self._file_of[name] = file


def require_hash(record: TensorRecord, actual: int) -> None:
    """CmfFormatError unless the payload's hash is the recorded one, or none is recorded."""
    if record.hash64 and record.hash64 != actual:
        raise _hash_fault(record.path, "hash of the payload", record.offset_bytes, record.hash64, actual, record.name)


def _hash_fault(
    path: Path, what: str, offset_bytes: int, recorded: int, actual: int, tensor: str | None = None
) -> CmfFormatError:
    return CmfFormatError(
        path,
        what,
        tensor=tensor,
        offset_bytes=offset_bytes,
        expected=f"{recorded:016x}",
        got=f"{actual:016x}",
        hint="the file is damaged: get it again from where it came",
    )


def _open_shards(path: Path) -> list[CmfFile]:
    """The file at `path` and, if it is a shard, its siblings, in shard order."""
    opened = CmfFile(path)
    files = [opened]
    try:
        count = _shard_position(opened)[1]
        if count == 1:
            return files
        stem = _require_shard_name(opened)
        shards: list[CmfFile] = []
        for no in range(1, count + 1):
            sibling = path.with_name(f"{stem}-{no:05d}-of-{count:05d}.cmf")
            shard = opened if sibling.name == path.name else _open_sibling(sibling, path)
            if shard is not opened:
                files.append(shard)
            shards.append(shard)
            _check_sibling(shard, opened, no, count)
        return shards
    except BaseException:
        for file in files:
            file.close()
        raise


def _shard_position(file: CmfFile) -> tuple[int, int]:
    """(no, count) of the header, (1, 1) without `shard`."""
    shard = file.header.get("shard")
    if shard is None:
        return 1, 1
    no, count = shard.get("no"), shard.get("count")
    if type(no) is not int or type(count) is not int or not 1 <= no <= count <= 99_999:
        at = file.envelope.spans["header"].offset_bytes
        raise CmfFormatError(
            file.path, "header.shard", offset_bytes=at, expected="1 <= no <= count", got=str(shard)[:80]
        )
    return no, count


def _require_shard_name(file: CmfFile) -> str:
    """The common part of the shards' names; CmfFormatError unless this file's name says what its header says."""
    no, count = _shard_position(file)
    match = _SHARD_NAME.fullmatch(file.path.name)
    if match is None or (int(match["no"]), int(match["count"])) != (no, count):
        raise CmfFormatError(
            file.path,
            f"the header says shard {no} of {count}, the file name does not",
            expected=f"a name like NAME-{no:05d}-of-{count:05d}.cmf",
            got=file.path.name,
            hint="shards are found by their names: don't rename them",
        )
    return match["stem"]


def _open_sibling(sibling: Path, opened: Path) -> CmfFile:
    if not sibling.exists():
        hint = "put all shards into one directory"
        raise CmfFormatError(opened, f"shard {sibling.name} is missing beside it", hint=hint)
    return CmfFile(sibling)


def _check_sibling(shard: CmfFile, opened: CmfFile, no: int, count: int) -> None:
    at = shard.envelope.spans["header"].offset_bytes
    if _shard_position(shard) != (no, count):
        got = shard.header.get("shard")
        raise CmfFormatError(
            shard.path, "header.shard", offset_bytes=at, expected=f"no {no}, count {count}", got=str(got)[:80]
        )
    if shard.header["arch"] != opened.header["arch"]:
        raise CmfFormatError(shard.path, f"header.arch differs from that of {opened.path.name}", offset_bytes=at)
