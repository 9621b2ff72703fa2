"""CMF v2, byte by byte: the constants and fixed-size structures that reader and writer share.

    0x00  envelope, 128 bytes (see `Envelope`)
          header     JSON
          directory  u64 count, u64 pool_off, count records of 56 bytes, UTF-8 name pool
          data       tensor payloads, from a multiple of 4096
          masks, vocab, index

Integers are little-endian. The order is the writer's; a reader finds sections through the envelope only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

MAGIC = b"CMF\x01"
VERSION = 2

ENVELOPE = struct.Struct("<4sIII12Q2Q")  # magic, version, flags, features, 6 x (off, len), header hash, directory hash
ENVELOPE_BYTES = ENVELOPE.size  # 128
SECTION_FIELDS_AT = 0x10  # byte offset of the first (off, len) pair

HEADER, DIRECTORY, DATA, MASKS, VOCAB, INDEX = SECTIONS = ("header", "dir", "data", "masks", "vocab", "index")
REQUIRED_SECTIONS = (HEADER, DIRECTORY)
OPTIONAL_SECTIONS = (MASKS, VOCAB, INDEX)  # their hashes are in header.section_hashes

DIRECTORY_HEAD = struct.Struct("<QQ")  # count, pool_off (from the section's start)
RECORD = struct.Struct("<IHBB6I3Q")  # name_off, name_len, dtype, ndim, shape[6], off, nbytes, hash64
RECORD_BYTES = RECORD.size  # 56
MAX_NDIM = 6
MAX_NAME_BYTES = 0xFFFF
MAX_ELEMENTS = 1 << 61  # an f32 copy of more would not be addressable

DATA_ALIGN = 4096  # of the data section in the file, and of large tensors inside it
TENSOR_ALIGN = 64  # of every tensor inside the data section
LARGE_TENSOR_BYTES = 16 * 1024  # from here on the writer aligns to DATA_ALIGN

GROUP = 32  # weights that share a scale

FEATURE_DIRECTORY = 1 << 0
FEATURE_MASKS = 1 << 1
FEATURE_TWO_FIELD = 1 << 2
FEATURE_PER_VISIT_MASKS = 1 << 5
FEATURE_STANDALONE_SKILL = 1 << 6
KNOWN_FEATURES = (
    FEATURE_DIRECTORY | FEATURE_MASKS | FEATURE_TWO_FIELD | FEATURE_PER_VISIT_MASKS | FEATURE_STANDALONE_SKILL
)


class DType(enum.IntEnum):
    """How a tensor's payload is encoded; the value is the id in the directory."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_ROW = 3
    Q4_BLOCK = 4
    MIX8_4 = 5
    U8 = 6
    Q4_COL = 7
    VBIT = 8
    Q8_2F = 9
    VBIT_RO = 10
    Q4_TILED = 11
    Q1 = 12
    Q1S = 13
    Q1T = 14
    Q4TP = 15
    Q2TP = 16

    @property
    def label(self) -> str:
        """The name as headers, reports and options write it, such as "q8_row"."""
        return self.name.lower()


RESERVED_DTYPES = frozenset({DType.MIX8_4, DType.U8, DType.Q4_COL})  # raw bytes, no weights
TWO_FIELD_DTYPES = frozenset({DType.Q8_2F, DType.VBIT})  # what FEATURE_TWO_FIELD announces; vbit_ro does not count


@dataclass(frozen=True)
class Span:
    """A run of bytes; the offset counts from the start of the file."""

    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte behind the span."""
        return self.offset_bytes + self.nbytes

    def contains(self, other: Span) -> bool:
        """Whether `other` lies wholly inside."""
        return self.offset_bytes <= other.offset_bytes and other.end_bytes <= self.end_bytes


ABSENT = Span(0, 0)


@dataclass(frozen=True)
class Envelope:
    """The first 128 bytes, as numbers; `spans` maps every section's name, absent ones to (0, 0). A hash of 0: none."""

    features: int
    spans: dict[str, Span] = field(default_factory=dict)
    header_hash64: int = 0
    directory_hash64: int = 0

    def pack(self) -> bytes:
        """The 128 bytes."""
        pairs = [self.spans.get(name, ABSENT) for name in SECTIONS]
        fields = [number for span in pairs for number in (span.offset_bytes, span.nbytes)]
        return ENVELOPE.pack(MAGIC, VERSION, 0, self.features, *fields, self.header_hash64, self.directory_hash64)


@dataclass(frozen=True)
class DirectoryEntry:
    """One directory record; `offset_bytes` counts from the start of the data section."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
    hash64: int


def directory_bytes(names: Sequence[str]) -> int:
    """Size of the directory section that holds tensors of these names."""
    return DIRECTORY_HEAD.size + RECORD_BYTES * len(names) + sum(len(name.encode()) for name in names)


def pack_directory(entries: Sequence[DirectoryEntry]) -> bytes:
    """The directory section: head, records, name pool in the order of the records."""
    records, pool = bytearray(), bytearray()
    for entry in entries:
        name = entry.name.encode()
        shape = (*entry.shape, *(0,) * (MAX_NDIM - len(entry.shape)))
        place = (entry.offset_bytes, entry.nbytes, entry.hash64)
        records += RECORD.pack(len(pool), len(name), entry.dtype, len(entry.shape), *shape, *place)
        pool += name
    head = DIRECTORY_HEAD.pack(len(entries), DIRECTORY_HEAD.size + len(records))
    return bytes(head + records + pool)


def align(offset_bytes: int, multiple_bytes: int) -> int:
    """The next multiple at or behind `offset_bytes`."""
    return -(-offset_bytes // multiple_bytes) * multiple_bytes


def tensor_alignment(nbytes: int) -> int:
    """What the writer aligns a payload of this size to, inside the data section."""
    return DATA_ALIGN if nbytes >= LARGE_TENSOR_BYTES else TENSOR_ALIGN
