"""q4_block and q4_tiled: 4 bits a weight, an f16 scale for each group of 32.

    q4_block  ceil(n/32)*16 nibble bytes | ceil(n/32) f16       groups run over the flat tensor, the last may be short
    q4_tiled  per tile: f16, 16 nibble bytes                    tiles are groups of a row, row-major; cols % 32 == 0

Byte k of a group holds weight 2k in its low nibble, 2k+1 in its high one: w = (nibble - 8) * scale, scale = absmax / 7.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cortiq_fcd.io.codecs.codec import (
    Payload,
    Shape,
    Weights,
    element_count,
    f16_scales,
    grouped_matrix,
    quantise,
    require_finite,
    require_size,
    row_blocks,
)
from cortiq_fcd.io.layout import GROUP

_NIBBLE_BYTES = GROUP // 2
_TILE = np.dtype([("scale", "<f2"), ("nibbles", "u1", _NIBBLE_BYTES)])
_BLOCK_GROUPS = 4096  # 64 KiB of nibbles: its looked-up weights still lie in the cache when they are scaled

_BYTE = np.arange(256)
# Both weights of a byte, (nibble - 8) as two f32, moved as one 64-bit word.
_PAIRS = np.stack([(_BYTE & 15) - 8, (_BYTE >> 4) - 8], axis=1).astype(np.float32).view(np.uint64).reshape(256)


def q4_block_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """18 bytes a group of 32, the last one counted whole."""
    return -(-element_count(shape) // GROUP) * (_NIBBLE_BYTES + 2)


def q4_tiled_nbytes(shape: Shape, payload: Payload | None = None) -> int:
    """18 bytes a tile; 2-D with cols % 32 == 0 only."""
    rows, groups = grouped_matrix(shape)
    return rows * groups * _TILE.itemsize


def decode_q4_block(payload: Payload, shape: Shape) -> Weights:
    """(nibble - 8) * scale; what the last group holds behind the tensor's end is ignored."""
    require_size(payload, q4_block_nbytes(shape))
    n = element_count(shape)
    groups = -(-n // GROUP)
    nibbles = payload[: groups * _NIBBLE_BYTES].reshape(groups, _NIBBLE_BYTES)
    scales = payload[groups * _NIBBLE_BYTES :].view("<f2").astype(np.float32)
    weights = scaled_nibbles(nibbles, scales).reshape(-1)
    return (weights if weights.size == n else weights[:n].copy()).reshape(shape)


def decode_q4_tiled(payload: Payload, shape: Shape) -> Weights:
    """(nibble - 8) * scale, tile by tile."""
    require_size(payload, q4_tiled_nbytes(shape))
    tiles = payload.view(_TILE)
    return scaled_nibbles(tiles["nibbles"], tiles["scale"].astype(np.float32)).reshape(shape)


def encode_q4_block(weights: Weights) -> Payload:
    """Scale absmax / 7, rounded to f16 before quantising; a short last group is padded with zeros."""
    require_finite(weights)
    flat = np.asarray(weights, np.float32).reshape(-1)
    whole = weights.size // GROUP
    groups = -(-weights.size // GROUP)
    payload = np.empty(groups * (_NIBBLE_BYTES + 2), np.uint8)
    nibbles = payload[: groups * _NIBBLE_BYTES].reshape(groups, _NIBBLE_BYTES)
    scales = payload[groups * _NIBBLE_BYTES :].view("<f2")
    _quantise_groups(flat[: whole * GROUP].reshape(whole, GROUP), scales[:whole], nibbles[:whole])
    last = np.zeros((groups - whole, GROUP), np.float32)
    last.reshape(-1)[: flat.size - whole * GROUP] = flat[whole * GROUP :]
    _quantise_groups(last, scales[whole:], nibbles[whole:])
    return payload


def encode_q4_tiled(weights: Weights) -> Payload:
    """As q4_block, in tiles; PayloadError unless 2-D with cols % 32 == 0."""
    rows, groups = grouped_matrix(weights.shape)
    require_finite(weights)
    tiles = np.empty(rows * groups, _TILE)
    _quantise_groups(np.asarray(weights, np.float32).reshape(-1, GROUP), tiles["scale"], tiles["nibbles"])
    return tiles.view(np.uint8)


def scaled_nibbles(nibbles: Payload, scales: Weights) -> Weights:
    """(nibble - 8) * scale for nibble bytes [groups, 16] and scales [groups]: [groups, 32]."""
    weights = np.empty((scales.size, GROUP), np.float32)
    words = weights.view(np.uint64)
    for start in range(0, scales.size, _BLOCK_GROUPS):
        block = slice(start, start + _BLOCK_GROUPS)
        np.take(_PAIRS, nibbles[block], out=words[block], mode="clip")
        weights[block] *= scales[block, None]
    return weights


def pack_nibbles(q: npt.NDArray[np.int8]) -> Payload:
    """Nibble bytes [groups, 16] of integers -8 .. 7 [groups, 32]."""
    biased = (q + np.int8(8)).view(np.uint8)
    packed: Payload = biased[:, 0::2] | (biased[:, 1::2] << 4)
    return packed


def _quantise_groups(groups: Weights, scales: npt.NDArray[np.float16], nibbles: Payload) -> None:
    """Fill `scales` [groups] and `nibbles` [groups, 16] from weights [groups, 32]."""
    for block in row_blocks(groups.shape[0], GROUP):
        scales[block] = f16_scales(np.abs(groups[block]).max(axis=1, initial=0.0) / np.float32(7))
        nibbles[block] = pack_nibbles(quantise(groups[block], scales[block].astype(np.float32)[:, None], -8, 7))
