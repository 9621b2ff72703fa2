"""The whole hash chain of a model, and what no hash covers: overlaps, gaps, bytes behind the end.

Faults make a file invalid. Notes are what a valid file may have, for instance one that grew by appending: hashes that
were not recorded, dead bytes between the parts, a section inside the data section's span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from cortiq_fcd.errors import CmfFormatError
from cortiq_fcd.io import layout
from cortiq_fcd.io.codecs import CODECS, PayloadError
from cortiq_fcd.io.container import CmfFile, TensorRecord, payload_fault
from cortiq_fcd.io.hashing import Hasher
from cortiq_fcd.io.header import section_hash
from cortiq_fcd.io.layout import DATA, DIRECTORY, HEADER, OPTIONAL_SECTIONS, SECTIONS, Span
from cortiq_fcd.io.reader import open_model

_NOT_RECORDED = "hash not recorded, so the bytes can't be checked"


@dataclass(frozen=True)
class Finding:
    """One line of a verification. `where` names the file and the part of it, `message` says what is the matter."""

    kind: Literal["fault", "note"]
    where: str
    message: str


def verify_model(path: str | Path) -> list[Finding]:
    """Everything that is wrong (faults) or remarkable (notes) about the model, all shards; [] for a perfect file.

    A file that can't be opened as CMF gives one fault, the reason. ConfigError when there is no such file.
    """
    try:
        model = open_model(path)
    except CmfFormatError as error:
        return [_fault(error)]
    with model:
        return [finding for file in model.files for finding in _file_findings(file)]


def _file_findings(file: CmfFile) -> Iterator[Finding]:
    yield from _section_hash_findings(file)
    for record in file.tensors.values():
        yield from _tensor_findings(file, record)
    yield from _overlap_findings(file)
    yield from _section_place_findings(file)
    yield from _gap_findings(file)


def _section_hash_findings(file: CmfFile) -> Iterator[Finding]:
    """Header and directory hashes were checked by opening, where there are any."""
    for name, recorded in ((HEADER, file.envelope.header_hash64), (DIRECTORY, file.envelope.directory_hash64)):
        if not recorded:
            yield _note(file, f"{name} section", _NOT_RECORDED)
    for name in OPTIONAL_SECTIONS:
        span, wanted = file.envelope.spans[name], section_hash(file.header, name)
        if not span.nbytes:
            if wanted is not None:
                yield _note(file, f"{name} section", "the header has a hash for it, but it is absent")
        elif wanted is None:
            yield _note(file, f"{name} section", _NOT_RECORDED)
        elif wanted != (actual := _hash_of(file, span)):
            yield _hash_fault(file, f"{name} section", span, wanted, actual)


def _tensor_findings(file: CmfFile, record: TensorRecord) -> Iterator[Finding]:
    part = f"tensor {record.name!r}"
    actual = _hash_of(file, record.span)
    if record.hash64 and record.hash64 != actual:
        yield _hash_fault(file, part, record.span, record.hash64, actual)
    elif not record.hash64 and actual:
        yield _note(file, part, _NOT_RECORDED)
    if record.dtype in layout.RESERVED_DTYPES:
        yield _note(file, part, f"{record.dtype.label} is a reserved dtype: raw bytes that can't be decoded to weights")
    check = CODECS[record.dtype].check
    if check is not None:
        try:
            check(file.view(record.span), record.shape)
        except PayloadError as error:
            yield _fault(payload_fault(record, error))
        finally:
            file.release(record.span)


def _overlap_findings(file: CmfFile) -> Iterator[Finding]:
    """Tensors that share bytes with one another, or with a section other than data, where they live."""
    sections = [(f"the {name} section", file.envelope.spans[name]) for name in SECTIONS if name != DATA]
    last: TensorRecord | None = None  # of those before, the one that ends last
    for record in sorted((r for r in file.tensors.values() if r.nbytes), key=lambda r: r.offset_bytes):
        others = [(f"tensor {last.name!r}", last.span)] if last else []
        for other, span in others + sections:
            shared = _overlap_bytes(record.span, span)
            if shared:
                yield Finding("fault", _where(file, f"tensor {record.name!r}"), f"shares {shared} bytes with {other}")
        if last is None or record.span.end_bytes > last.span.end_bytes:
            last = record


def _section_place_findings(file: CmfFile) -> Iterator[Finding]:
    spans = {name: span for name, span in file.envelope.spans.items() if span.nbytes}
    for one, two in combinations(spans, 2):
        shared = _overlap_bytes(spans[one], spans[two])
        if not shared:
            continue
        inner, outer = (one, two) if spans[two].contains(spans[one]) else (two, one)
        if spans[outer].contains(spans[inner]):
            yield _note(file, f"{inner} section", f"lies inside the span of the {outer} section")
        else:
            yield Finding("fault", _where(file, f"{two} section"), f"shares {shared} bytes with the {one} section")
    excess = file.size_bytes - _end_bytes(file)
    if excess:
        where = _where(file, f"byte {_end_bytes(file)}")
        yield Finding("fault", where, f"{excess} bytes past the last section")


def _gap_findings(file: CmfFile) -> Iterator[Finding]:
    """Bytes that belong to nothing should be zero padding."""
    live = [span for name, span in file.envelope.spans.items() if name != DATA]
    live += [Span(0, layout.ENVELOPE_BYTES), *(record.span for record in file.tensors.values())]
    at = 0
    for span in [*sorted(live, key=lambda span: span.offset_bytes), Span(_end_bytes(file), 0)]:
        gap = Span(at, span.offset_bytes - at)
        if gap.nbytes > 0 and _has_content(file, gap):
            yield _note(file, f"byte {gap.offset_bytes}", f"{gap.nbytes} bytes between the parts are not all zero")
        at = max(at, span.end_bytes)


def _end_bytes(file: CmfFile) -> int:
    return max(span.end_bytes for span in file.envelope.spans.values())


def _has_content(file: CmfFile, span: Span) -> bool:
    return any(np.frombuffer(piece, np.uint8).any() for piece in file.chunks(span))


def _hash_of(file: CmfFile, span: Span) -> int:
    hasher = Hasher()
    for piece in file.chunks(span):
        hasher.update(piece)
    return hasher.digest()


def _overlap_bytes(one: Span, two: Span) -> int:
    return max(0, min(one.end_bytes, two.end_bytes) - max(one.offset_bytes, two.offset_bytes))


def _where(file: CmfFile, part: str) -> str:
    return f"{file.path}: {part}"


def _note(file: CmfFile, part: str, message: str) -> Finding:
    return Finding("note", _where(file, part), message)


def _hash_fault(file: CmfFile, part: str, span: Span, recorded: int, actual: int) -> Finding:
    message = (
        f"hash of the {span.nbytes} bytes at byte {span.offset_bytes}: expected {recorded:016x}, got {actual:016x}"
    )
    return Finding("fault", _where(file, part), message)


def _fault(error: CmfFormatError) -> Finding:
    return Finding("fault", error.path, error.message.removeprefix(error.path).lstrip(": "))
