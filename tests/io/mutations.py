"""Small valid files and the many ways to break them, each from a numbered seed.

Mutations of header and directory would all end at their hashes, so most cases take the hashes out (0 = not recorded) or
compute them again: what lies behind is meant.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

import numpy as np

from tests.io.hand_rolled import HEADER, IDS, Layout, Tensor, pack, payload_of, small_model
from tests.oracles.cmf_reader import hash64

NUMBERS = (
    0,
    1,
    2,
    31,
    32,
    63,
    64,
    127,
    128,
    255,
    4095,
    4096,
    2**16 - 1,
    2**31,
    2**32 - 1,
    2**61,
    2**63,
    2**64 - 64,
    2**64 - 1,
)
TOKENS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0.0", b"9" * 5000, b"null", b"true", b"[]", b"{}", b'""',
    b"[" * 2000, b'{"a":' * 2000, b'"\\ud800"', b'"\\u0000"', b"\xff", b"\x00", b'"a":1,"a":2', b'{"no":1,"count":2}',
    b'"shard":{"no":2,"count":3},', b'"arch":null,', b"\\", b'"',
)  # fmt: skip


def seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    tiny = [
        Tensor(name, IDS[name], (2, 32), payload_of(name, (2, 32), rng)) for name in ("vbit", "vbit_ro", "q1s", "q1t")
    ]
    plain = [Tensor("a", 0, (3,), rng.bytes(12)), Tensor("b", 4, (40,), payload_of("q4_block", (40,), rng))]
    sharded = {**HEADER, "shard": {"no": 1, "count": 1}, "section_hashes": {"vocab": "0" * 16}}
    return [
        pack(small_model(rng)),
        pack(Layout(tiny, sections={"vocab": b"{}"})),
        pack(Layout(plain, sharded, {"index": rng.bytes(9)})),
        pack(Layout()),
    ]


SEEDS = seeds()


def mutated(case: int) -> bytes:
    """File number `case`: a seed with one to three mutations."""
    rng = random.Random(case)
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(data) >= 128:
            rng.choice(MUTATIONS)(data, rng)
    if len(data) >= 128:
        rng.choice((keep_hashes, drop_hashes, drop_hashes, renew_hashes, renew_hashes))(data)
    return bytes(data)


def span(data: bytearray, section: int) -> tuple[int, int]:
    """Offset and end of section 0 .. 5, cut to the file."""
    off, length = struct.unpack_from("<QQ", data, 16 + 16 * section)
    return min(off, len(data)), min(off + length, len(data))


def somewhere(data: bytearray, rng: random.Random) -> int:
    """A place in a part of the file, all parts equally likely, however small."""
    start, end = rng.choice([(0, 128), (0, len(data)), *(span(data, k) for k in range(6))])
    return rng.randrange(start, end) if start < end else rng.randrange(len(data))


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[somewhere(data, rng)] ^= 1 << rng.randrange(8)


def random_bytes(data: bytearray, rng: random.Random) -> None:
    at = somewhere(data, rng)
    new = rng.randbytes(rng.choice((1, 4, 8, 64)))
    data[at : at + len(new)] = new[: len(data) - at]


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.choice((somewhere(data, rng), len(data) - 1, rng.randrange(129))) :]


def extend(data: bytearray, rng: random.Random) -> None:
    data += rng.choice((b"\0", rng.randbytes(5), bytes(5000)))


def insert_or_remove(data: bytearray, rng: random.Random) -> None:
    at = somewhere(data, rng)
    if rng.random() < 0.5:
        data[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
    else:
        del data[at : at + rng.choice((1, 8, 64))]


def put_number(data: bytearray, at: int, size: int, rng: random.Random) -> None:
    old = int.from_bytes(data[at : at + size], "little")
    near = (old + rng.choice((-64, -1, 1, 64, 4096)), len(data), len(data) - old, old * 2)
    value = rng.choice((*NUMBERS, *near)) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, "little")[: max(0, len(data) - at)]


def envelope_field(data: bytearray, rng: random.Random) -> None:
    at, size = rng.choice([(4, 4), (8, 4), (12, 4), *((16 + 8 * k, 8) for k in range(14))])
    put_number(data, at, size, rng)


def swap_sections(data: bytearray, rng: random.Random) -> None:
    one, two = (16 + 16 * rng.randrange(6) for _ in range(2))
    data[one : one + 16], data[two : two + 16] = data[two : two + 16], data[one : one + 16]


def record_field(data: bytearray, rng: random.Random) -> None:
    start, end = span(data, 1)
    count = min((end - start) // 56, 17)
    fields = [(0, 4), (4, 2), (6, 1), (7, 1), *((8 + 4 * k, 4) for k in range(6)), (32, 8), (40, 8), (48, 8)]
    at, size = rng.choice(fields)
    at += start + 16 + 56 * rng.randrange(count) if count else start
    if rng.random() < 0.15:
        at, size = start + rng.choice((0, 8)), 8
    put_number(data, at, size, rng)


def record_dtype(data: bytearray, rng: random.Random) -> None:
    start, end = span(data, 1)
    count = min((end - start) // 56, 17)
    if count:
        data[start + 16 + 56 * rng.randrange(count) + 6] = rng.randrange(20)


def copy_record(data: bytearray, rng: random.Random) -> None:
    start, end = span(data, 1)
    count = min((end - start) // 56, 17)
    if count:
        one, two = (start + 16 + 56 * rng.randrange(count) for _ in range(2))
        part = rng.choice((slice(0, 56), slice(0, 6), slice(6, 32), slice(32, 48)))
        data[two + part.start : two + part.stop] = data[one + part.start : one + part.stop]


def header_token(data: bytearray, rng: random.Random) -> None:
    """Put a token into the JSON, keeping it valid around it where that is easy."""
    start, end = span(data, 0)
    text = bytes(data[start:end])
    places = [k for k, byte in enumerate(text) if byte in b'{[,:"'] or [0]
    at = rng.choice(places) + rng.choice((0, 1))
    token = rng.choice(TOKENS)
    replace_header(data, text[:at] + token + text[at + rng.choice((0, 0, 1, len(token))) :])


def header_value(data: bytearray, rng: random.Random) -> None:
    """Change a value at the top or one level down: valid JSON, wrong or odd content."""
    start, end = span(data, 0)
    try:
        header = json.loads(bytes(data[start:end]))
        keys = list(header)
    except (ValueError, TypeError, RecursionError):
        return
    values = (
        None,
        0,
        -1,
        2**80,
        1.5,
        "",
        "x",
        [],
        {},
        [[]],
        True,
        "0123456789abcdef",
        {"no": 1, "count": 1},
        {"no": 2},
    )
    key = rng.choice([*keys, "shard", "section_hashes", "tokenizer_config", "skills", "provenance"])
    inner = header.get(key)
    if isinstance(inner, dict) and inner and rng.random() < 0.5:
        inner[rng.choice([*inner, "vocab", "no", "count"])] = rng.choice(values)
    else:
        header[key] = rng.choice(values)
    replace_header(data, json.dumps(header).encode())


def replace_header(data: bytearray, text: bytes) -> None:
    """Append the new header to the end, as tools that append to a file do."""
    struct.pack_into("<QQ", data, 16, len(data), len(text))
    data += text


def keep_hashes(data: bytearray) -> None:
    pass


def drop_hashes(data: bytearray) -> None:
    data[0x70:0x80] = bytes(16)


def renew_hashes(data: bytearray) -> None:
    for section, at in ((0, 0x70), (1, 0x78)):
        start, end = span(data, section)
        struct.pack_into("<Q", data, at, hash64(bytes(data[start:end])))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits, flip_bits, random_bytes, truncate, extend, insert_or_remove, envelope_field, envelope_field,
    swap_sections, record_field, record_field, record_dtype, copy_record, header_token, header_value,
)  # fmt: skip
