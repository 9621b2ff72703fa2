"""CMF files packed by hand, right or wrong on purpose, and valid random payloads for every dtype."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.cmf_reader import hash64

ARCH = {"arch_name": "llama", "hidden_size": 32, "x_unknown": {"deep": [1, None, "ключ"]}}
HEADER: dict[str, Any] = {"format": "cmf", "version": 2, "arch": ARCH, "quant_type": "F32"}

IDS = {
    "f32": 0, "f16": 1, "bf16": 2, "q8_row": 3, "q4_block": 4, "mix8_4": 5, "u8": 6, "q4_col": 7, "vbit": 8,
    "q8_2f": 9, "vbit_ro": 10, "q4_tiled": 11, "q1": 12, "q1s": 13, "q1t": 14, "q4tp": 15, "q2tp": 16,
}  # fmt: skip
RESERVED = ("mix8_4", "u8", "q4_col")
DECODABLE = tuple(name for name in IDS if name not in RESERVED)
ANY_SHAPE = ("f32", "f16", "bf16", "q4_block")
ANY_MATRIX = (*ANY_SHAPE, "q8_row", "q8_2f")


@dataclass
class Tensor:
    """One directory record; what is None is computed."""

    name: str | bytes
    dtype: int
    shape: Sequence[int]
    payload: bytes
    ndim: int | None = None
    off: int | None = None
    nbytes: int | None = None
    hash64: int | None = None
    name_off: int | None = None
    tail: Sequence[int] = ()


@dataclass
class Layout:
    """A file in parts. `spans` and the hashes overrule what packing would write into the envelope."""

    tensors: Sequence[Tensor] = ()
    header: Mapping[str, Any] | bytes = field(default_factory=lambda: dict(HEADER))
    sections: Mapping[str, bytes] = field(default_factory=dict)
    features: int | None = None
    magic: bytes = b"CMF\x01"
    version: int = 2
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    header_hash: int | None = None
    dir_hash: int | None = None
    count: int | None = None
    pool_off: int | None = None
    trailing: bytes = b""


def pack(plan: Layout) -> bytes:
    data, records, pool = bytearray(), bytearray(), bytearray()
    for t in plan.tensors:
        data += bytes(-len(data) % 64)
        off = len(data) if t.off is None else t.off
        if t.off is None:
            data += t.payload
        name = t.name.encode() if isinstance(t.name, str) else t.name
        shape = (list(t.shape)[:6] + list(t.tail) + [0] * 6)[:6]
        records += struct.pack(
            "<IHBB6I3Q",
            len(pool) if t.name_off is None else t.name_off,
            len(name),
            t.dtype,
            len(t.shape) if t.ndim is None else t.ndim,
            *shape,
            off,
            len(t.payload) if t.nbytes is None else t.nbytes,
            hash64(t.payload) if t.hash64 is None else t.hash64,
        )
        pool += name
    count = len(plan.tensors) if plan.count is None else plan.count
    pool_off = 16 + len(records) if plan.pool_off is None else plan.pool_off
    directory = struct.pack("<QQ", count, pool_off) + bytes(records) + bytes(pool)
    header = plan.header if isinstance(plan.header, bytes) else pack_header(plan)
    spans = {"header": (128, len(header)), "dir": (128 + len(header), len(directory))}
    body = header + directory
    if data:
        body += bytes(-(128 + len(body)) % 4096)
        spans["data"] = (128 + len(body), len(data))
        body += data
    for name in ("masks", "vocab", "index"):
        if name in plan.sections:
            spans[name] = (128 + len(body), len(plan.sections[name]))
            body += plan.sections[name]
    spans |= plan.spans
    numbers = [n for name in ("header", "dir", "data", "masks", "vocab", "index") for n in spans.get(name, (0, 0))]
    features = plan.features
    if features is None:
        features = 1 | 2 * ("masks" in plan.sections) | 4 * any(t.dtype in (8, 9) for t in plan.tensors)
    hashes = [
        hash64(header) if plan.header_hash is None else plan.header_hash,
        hash64(directory) if plan.dir_hash is None else plan.dir_hash,
    ]
    envelope = struct.pack("<4s3I14Q", plan.magic, plan.version, 0, features, *numbers, *hashes)
    return envelope + body + plan.trailing


def pack_header(plan: Layout) -> bytes:
    header = dict(plan.header)  # type: ignore[arg-type]
    if plan.sections and "section_hashes" not in header:
        header["section_hashes"] = {name: f"{hash64(data):016x}" for name, data in plan.sections.items()}
    return json.dumps(header, ensure_ascii=False).encode()


def payload_of(dtype: str, shape: Sequence[int], rng: np.random.Generator) -> bytes:
    """Random bits wherever the dtype allows any, valid fields elsewhere."""
    n = math.prod(shape)
    if dtype in ANY_SHAPE:
        return rng.bytes({"f32": 4 * n, "f16": 2 * n, "bf16": 2 * n, "q4_block": -(-n // 32) * 18}[dtype])
    rows, cols = shape
    gpr = cols // 32
    sized: dict[str, Callable[[], bytes]] = {
        "q8_row": lambda: rng.bytes(n + 2 * rows),
        "q8_2f": lambda: rng.bytes(n + 2 * rows + 2 * cols),
        "q4_tiled": lambda: rng.bytes(rows * gpr * 18),
        "q1": lambda: rng.bytes(rows * gpr * 6),
        "q1s": lambda: rng.bytes(rows * gpr * 6) + flat_overlay(n, rng),
        "q1t": lambda: rng.bytes(rows * gpr * 9) + row_overlay(rows, cols, rng),
        "q4tp": lambda: rng.bytes(rows * gpr * 16) + rng.bytes(4 * rows + rows * -(-gpr * 5 // 8)),
        "q2tp": lambda: rng.bytes(rows * gpr * 8) + rng.bytes(4 * rows + rows * -(-gpr * 5 // 8)),
        "vbit": lambda: packed_rows(rows, gpr, rng, offsets=False),
        "vbit_ro": lambda: packed_rows(rows, gpr, rng, offsets=True),
    }
    return sized[dtype]()


def flat_overlay(n: int, rng: np.random.Generator) -> bytes:
    count = min(n, 7)
    entries = (struct.pack("<I", rng.integers(n)) + rng.bytes(2) for _ in range(count))
    return struct.pack("<I", count) + b"".join(entries)


def row_overlay(rows: int, cols: int, rng: np.random.Generator) -> bytes:
    counts = rng.integers(0, 4, rows) if cols else np.zeros(rows, int)
    pointers = np.concatenate([[0], np.cumsum(counts)]).astype("<u4")
    entries = (struct.pack("<H", rng.integers(cols)) + rng.bytes(2) for _ in range(int(pointers[-1])))
    return pointers.tobytes() + b"".join(entries)


def packed_rows(rows: int, gpr: int, rng: np.random.Generator, *, offsets: bool) -> bytes:
    widths = rng.choice([3, 4, 5, 6, 8], rows).astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum(widths.astype(int) * gpr * 4)])
    table = starts.astype("<u4").tobytes() if offsets else b""
    return widths.tobytes() + rng.bytes(2 * rows * gpr) + table + rng.bytes(int(starts[-1]))


def small_model(rng: np.random.Generator) -> Layout:
    """A tensor of every dtype, all sections, unknown keys at every level."""
    tensors = [Tensor(f"t.{name}.weight", IDS[name], (3, 64), payload_of(name, (3, 64), rng)) for name in DECODABLE]
    tensors += [Tensor("t.u8", IDS["u8"], (5,), rng.bytes(5)), Tensor("t.norm.weight", 0, (32,), rng.bytes(128))]
    header = {
        **HEADER,
        "provenance": {"note": "by hand", "x": {"y": [1.5, "é"]}},
        "tokenizer_config": {"eos_token_ids": [0], "x_tok": 1},
        "skills": [{"id": "a", "x_skill": None}],
        "x_top": [1, "two", {"three": 3.5}],
    }
    return Layout(tensors, header, {"masks": rng.bytes(37), "vocab": b'{"model": {}}', "index": rng.bytes(24)})
