"""Every dtype weight by weight, in plain Python loops over the bytes: slow, obvious, and none of the package's code."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

F32 = np.float32


def f16_at(data: bytes, offset: int) -> np.float32:
    return F32(np.frombuffer(data, "<f2", 1, offset)[0])


def decode(dtype: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    with np.errstate(all="ignore"):
        weights = list(DECODERS[dtype](data, list(shape)))
    return np.array(weights, F32).reshape(shape)


def decode_f32(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    return (np.frombuffer(data, "<f4", 1, 4 * i)[0] for i in range(math.prod(shape)))


def decode_f16(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    return (f16_at(data, 2 * i) for i in range(math.prod(shape)))


def decode_bf16(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    return (np.frombuffer(b"\0\0" + data[2 * i : 2 * i + 2], "<f4")[0] for i in range(math.prod(shape)))


def decode_q8_row(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    rows, cols = shape
    for i in range(rows * cols):
        yield F32(struct.unpack_from("b", data, i)[0]) * f16_at(data, rows * cols + 2 * (i // cols))


def decode_q8_2f(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    rows, cols = shape
    for i, w in enumerate(decode_q8_row(data, shape)):
        yield w * f16_at(data, rows * cols + 2 * rows + 2 * (i % cols))


def nibble(data: bytes, i: int) -> int:
    return data[i // 2] >> (4 * (i % 2)) & 15


def decode_q4_block(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    groups = -(-math.prod(shape) // 32)
    for i in range(math.prod(shape)):
        yield F32(nibble(data, i) - 8) * f16_at(data, 16 * groups + 2 * (i // 32))


def decode_q4_tiled(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    for i in range(math.prod(shape)):
        tile = 18 * (i // 32)
        yield F32(nibble(data[tile + 2 : tile + 18], i % 32) - 8) * f16_at(data, tile)


def decode_q1(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    for i in range(math.prod(shape)):
        tile, k = 6 * (i // 32), i % 32
        scale = f16_at(data, tile)
        yield scale if data[tile + 2 + k // 8] >> (k % 8) & 1 else -scale


def decode_q1s(data: bytes, shape: list[int]) -> list[np.float32]:
    weights = list(decode_q1(data, shape))
    at = 6 * (len(weights) // 32)
    (count,) = struct.unpack_from("<I", data, at)
    for e in range(count):
        (index,) = struct.unpack_from("<I", data, at + 4 + 6 * e)
        weights[index] = f16_at(data, at + 8 + 6 * e)
    return weights


def decode_q1t(data: bytes, shape: list[int]) -> list[np.float32]:
    rows, cols = shape
    weights = []
    for i in range(rows * cols):
        tile, k = 9 * (i // 32), i % 32
        scale = f16_at(data, tile)
        code = data[tile + 2 + k // 5] // 3 ** (k % 5) % 3
        weights.append((F32(0), scale, -scale)[code])
    pointers_at = 9 * (rows * cols // 32)
    pointers = struct.unpack_from(f"<{rows + 1}I", data, pointers_at)
    for row in range(rows):
        for e in range(pointers[row], pointers[row + 1]):
            at = pointers_at + 4 * (rows + 1) + 4 * e
            (col,) = struct.unpack_from("<H", data, at)
            weights[row * cols + col] = f16_at(data, at + 2)
    return weights


def decode_vbit(data: bytes, shape: list[int], table_bytes: int = 0) -> Iterator[np.float32]:
    rows, cols = shape
    row_at = rows + 2 * (rows * cols // 32) + table_bytes
    for row in range(rows):
        b = data[row]
        bits = int.from_bytes(data[row_at : row_at + cols * b // 8], "big")
        for col in range(cols):
            u = bits >> (b * (cols - 1 - col)) & ((1 << b) - 1)
            yield F32(u - (2 ** (b - 1) - 1)) * f16_at(data, rows + 2 * ((row * cols + col) // 32))
        row_at += cols * b // 8


def decode_vbit_ro(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    return decode_vbit(data, shape, 4 * (shape[0] + 1))


def ladder_of(data: bytes, params_at: int, row: int) -> list[np.float32]:
    lo, step = f16_at(data, params_at + 4 * row), f16_at(data, params_at + 4 * row + 2)
    rungs = [F32(np.exp2(np.float64(lo)))]
    while len(rungs) < 32:
        rungs.append(rungs[-1] * F32(np.exp2(np.float64(step))))
    return rungs


def rung_of(data: bytes, codes_at: int, row: int, group: int, gpr: int) -> int:
    row_bytes = -(-gpr * 5 // 8)
    bits = int.from_bytes(data[codes_at + row * row_bytes : codes_at + (row + 1) * row_bytes], "little")
    return bits >> (5 * group) & 31


def decode_q4tp(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    rows, cols = shape
    params_at = rows * cols // 2
    for row in range(rows):
        ladder = ladder_of(data, params_at, row)
        for col in range(cols):
            rung = rung_of(data, params_at + 4 * rows, row, col // 32, cols // 32)
            yield F32(nibble(data, row * cols + col) - 8) * ladder[rung]


def decode_q2tp(data: bytes, shape: list[int]) -> Iterator[np.float32]:
    rows, cols = shape
    params_at = rows * cols // 4
    for row in range(rows):
        ladder = [F32(0), *ladder_of(data, params_at, row)]
        for col in range(cols):
            i = row * cols + col
            rung = rung_of(data, params_at + 4 * rows, row, col // 32, cols // 32)
            yield F32((data[i // 4] >> (2 * (i % 4)) & 3) - 1.5) * ladder[rung]


DECODERS: dict[str, Callable[[bytes, list[int]], Iterator[np.float32] | list[np.float32]]] = {
    name.removeprefix("decode_"): function for name, function in list(globals().items()) if name.startswith("decode_")
}


def scale_of(weights: Sequence[np.float32], top: int) -> np.float16:
    return np.float16(max((abs(w) for w in weights), default=F32(0)) / F32(top))


def level(w: np.float32, scale: np.float16, low: int, high: int) -> int:
    """w / scale rounded to the nearest integer, halves to the even one, clipped."""
    if scale == 0:
        return 0
    return max(low, min(high, round(float(F32(w) / F32(scale)))))


def encode_q8_row(weights: np.ndarray) -> bytes:
    scales = [scale_of(list(row), 127) for row in weights]
    q = [level(w, scale, -127, 127) for row, scale in zip(weights, scales, strict=True) for w in row]
    return struct.pack(f"{len(q)}b", *q) + np.array(scales, "<f2").tobytes()


def encode_group(group: list[np.float32]) -> tuple[bytes, bytes]:
    scale = scale_of(group, 7)
    q = [level(w, scale, -8, 7) + 8 for w in group]
    return bytes(q[2 * k] | q[2 * k + 1] << 4 for k in range(16)), np.array([scale], "<f2").tobytes()


def encode_q4_block(weights: np.ndarray) -> bytes:
    flat = list(weights.reshape(-1))
    flat += [F32(0)] * (-len(flat) % 32)
    groups = [encode_group(flat[g : g + 32]) for g in range(0, len(flat), 32)]
    return b"".join(nibbles for nibbles, _ in groups) + b"".join(scale for _, scale in groups)


def encode_q4_tiled(weights: np.ndarray) -> bytes:
    flat = list(weights.reshape(-1))
    return b"".join(
        scale + nibbles for nibbles, scale in (encode_group(flat[g : g + 32]) for g in range(0, len(flat), 32))
    )


def encode_f32(weights: np.ndarray) -> bytes:
    return b"".join(struct.pack("<f", w) for w in weights.reshape(-1))


def encode_f16(weights: np.ndarray) -> bytes:
    return b"".join(struct.pack("<e", w) for w in weights.reshape(-1))


def encode_bf16(weights: np.ndarray) -> bytes:
    halves = []
    for w in weights.reshape(-1):
        (bits,) = struct.unpack("<I", struct.pack("<f", w))
        kept, lost = bits >> 16, bits & 0xFFFF
        halves.append(kept + (lost > 0x8000 or (lost == 0x8000 and kept % 2 == 1)))
    return struct.pack(f"<{len(halves)}H", *halves)


ENCODERS: dict[str, Callable[[np.ndarray], bytes]] = {
    name.removeprefix("encode_"): function
    for name, function in list(globals().items())
    if name.startswith("encode_") and name != "encode_group"
}
