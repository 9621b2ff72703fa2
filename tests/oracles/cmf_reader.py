"""A second CMF reader, from the format's description alone: it shares no line with the package and checks every hash.

Seven dtypes; naive, one file in memory, AssertionError for anything wrong.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

SECTIONS = ("header", "dir", "data", "masks", "vocab", "index")
DTYPES = {0: "f32", 1: "f16", 2: "bf16", 3: "q8_row", 4: "q4_block", 9: "q8_2f", 11: "q4_tiled"}


def fmix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def hash64(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    places = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    acc = np.bitwise_xor.reduce(fmix64(words) ^ places) ^ np.uint64(len(data))
    return int(fmix64(np.array([acc], np.uint64))[0])


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray | bytes], dict[str, bytes]]:
    """(header, tensors as f32 arrays or, for other dtypes, their bytes, sections)."""
    data = Path(path).read_bytes()
    magic, version, _, features, *rest = struct.unpack_from("<4s3I14Q", data)
    assert (magic, version, features & 1, features & ~0b1100111) == (b"CMF\x01", 2, 1, 0), "envelope"
    spans = dict(zip(SECTIONS, zip(rest[0:12:2], rest[1:12:2], strict=True), strict=True))
    parts = {name: data[off : off + length] for name, (off, length) in spans.items()}
    assert all(len(parts[name]) == length for name, (_, length) in spans.items()), "section past the end"
    assert max(off + length for off, length in spans.values()) == len(data), "bytes past the last section"
    assert [hash64(parts["header"]), hash64(parts["dir"])] == rest[12:], "header or directory hash"
    header = json.loads(parts["header"].decode("utf-8"))
    for name, recorded in header.get("section_hashes", {}).items():
        assert f"{hash64(parts[name]):016x}" == recorded, f"hash of {name}"
    count, pool = struct.unpack_from("<QQ", parts["dir"])
    tensors: dict[str, np.ndarray | bytes] = {}
    for k in range(count):
        name_off, name_len, dtype, ndim, *rest = struct.unpack_from("<IHBB6I3Q", parts["dir"], 16 + 56 * k)
        name = parts["dir"][pool + name_off :][:name_len].decode("utf-8")
        off, nbytes, recorded = rest[6:]
        payload = parts["data"][off : off + nbytes]
        assert name not in tensors, name
        assert (len(payload), off % 64, spans["data"][0] % 4096) == (nbytes, 0, 0), name
        assert hash64(payload) == recorded, f"hash of {name}"
        tensors[name] = decode(DTYPES[dtype], payload, rest[:ndim]) if dtype in DTYPES else payload
    return header, tensors, {name: parts[name] for name in ("masks", "vocab", "index") if parts[name]}


def decode(dtype: str, payload: bytes, shape: list[int]) -> np.ndarray:
    n = int(np.prod(shape, dtype=np.int64))
    if dtype in ("f32", "f16"):
        return np.frombuffer(payload, "<f4" if dtype == "f32" else "<f2").astype(np.float32).reshape(shape)
    if dtype == "bf16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype in ("q8_row", "q8_2f"):
        rows = shape[0]
        scales = np.frombuffer(payload[n:], "<f2").astype(np.float32)
        w = np.frombuffer(payload[:n], np.int8).reshape(shape).astype(np.float32) * scales[:rows, None]
        return w * scales[rows:] if dtype == "q8_2f" else w
    groups = -(-n // 32)
    if dtype == "q4_block":
        nibbles, scales = payload[: 16 * groups], np.frombuffer(payload[16 * groups :], "<f2")
    else:
        tiles = [payload[18 * g : 18 * g + 18] for g in range(groups)]
        nibbles, scales = b"".join(t[2:] for t in tiles), np.frombuffer(b"".join(t[:2] for t in tiles), "<f2")
    codes = np.array([(byte >> shift & 15) - 8 for byte in nibbles for shift in (0, 4)], np.float32)
    return (codes.reshape(groups, 32) * scales.astype(np.float32)[:, None]).reshape(-1)[:n].reshape(shape)
