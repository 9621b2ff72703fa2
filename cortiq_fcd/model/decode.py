"""Decoding one token at a time: exact layers with a key-value cache, converted layers with the served O(1) state.

A prompt pass is exact everywhere; then converted layers are sealed (unless the prompt is too short for that, and they
stay exact for ever). Sequences of a batch move in step, so their prompts have the same length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_attention
from cortiq_fcd.kernels.o1_stream import StreamState, seal_stream, stream_step
from cortiq_fcd.kernels.rope import Rotation
from cortiq_fcd.model.conversion import is_exact, landmark_count
from cortiq_fcd.model.layer import LayerWeights, attention_output, embed, feed_forward, project_qkv
from cortiq_fcd.model.replica import Replica, final_norm


@dataclass
class KvCache:
    """Keys and values so far: buffers [B, G, capacity, D], of which the first `length` rows are filled."""

    k: Tensor
    v: Tensor
    length: int


class Decoder:
    """A batch of sequences being decoded through one model; `position` tokens have been seen."""

    def __init__(self, replica: Replica, *, student: bool, served: bool, capacity: int) -> None:
        """`student`: the masters, else the frozen weights. `served`: converted layers run the O(1) kernel.

        `capacity` is the largest number of tokens, prompt included.
        """
        self.replica = replica
        self.layers = replica.student_layers if student else replica.weights.layers
        self.served = served
        self.capacity = capacity
        self.position = 0
        self._angles = replica.rotation(capacity)
        self._states: list[StreamState | KvCache] = []

    def prompt(self, ids: Tensor) -> Tensor:
        """The exact pass over prompts ids [B, T]; the normalised hidden rows [B, C] of their last tokens."""
        batch, length = ids.shape
        shape = self.replica.weights.shape
        angles = self._angles.rows(0, length)
        x = embed(ids, self.replica.weights.embed)
        for i, layer in enumerate(self.layers):
            q, k, v, _ = project_qkv(x, layer, shape, angles, batch)
            out, _ = causal_attention.causal_attention_fwd(q, k, v, shape.scale)
            self._states.append(self._seal(i, q, k, v))
            x, _ = feed_forward(attention_output(out, x, layer), layer, shape)
        self.position = length
        return final_norm(self.replica, x.view(batch, length, -1)[:, -1])[0]

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token of each sequence, tokens [B]; the normalised hidden rows [B, C]."""
        angles = self._angles.rows(self.position, self.position + 1)
        x = embed(tokens, self.replica.weights.embed)
        for layer, state in zip(self.layers, self._states, strict=True):
            x = self._layer_step(x, layer, state, angles)
        self.position += 1
        return final_norm(self.replica, x)[0]

    def _layer_step(self, x: Tensor, layer: LayerWeights, state: StreamState | KvCache, angles: Rotation) -> Tensor:
        shape = self.replica.weights.shape
        q, k, v, _ = project_qkv(x, layer, shape, angles, x.shape[0])
        q, k, v = q.squeeze(3), k.squeeze(2), v.squeeze(2)
        if isinstance(state, StreamState):
            out = stream_step(state, q, k, v)
        else:
            state.k[:, :, state.length], state.v[:, :, state.length] = k, v
            state.length += 1
            seen = slice(0, state.length)
            out = causal_attention.causal_attention_step(q, state.k[:, :, seen], state.v[:, :, seen], shape.scale)
        return feed_forward(attention_output(out.unsqueeze(3), x, layer), layer, shape)[0]

    def _seal(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> StreamState | KvCache:
        setting, length = self.replica.conversion, k.shape[2]
        if self.served and index in setting.layers and not is_exact(length, setting.w, setting.sink):
            return seal_stream(
                q,
                k,
                v,
                landmark_count=landmark_count(length, setting.m),
                window=setting.w,
                sink=setting.sink,
                scale=self.replica.weights.shape.scale,
            )
        room = (*k.shape[:2], self.capacity - length)
        return KvCache(
            torch.cat((k, k.new_zeros(*room, k.shape[3])), 2), torch.cat((v, v.new_zeros(*room, v.shape[3])), 2), length
        )


def greedy(
    replica: Replica, prompts: Tensor, new_tokens: int, eos_ids: tuple[int, ...], *, student: bool, served: bool
) -> list[list[int]]:
    """Greedy continuations of prompts [B, T]: at most `new_tokens` ids each; an eos id ends one and counts."""
    decoder = Decoder(replica, student=student, served=served, capacity=prompts.shape[1] + new_tokens)
    head = replica.weights.head
    hidden = decoder.prompt(prompts)
    columns: list[Tensor] = []
    running = torch.ones(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    stops = torch.tensor(eos_ids, dtype=torch.int64, device=prompts.device)
    for count in range(new_tokens):
        # Rows that have ended keep their place in the batch; what they say after their eos is cut off below.
        tokens = torch.argmax(hidden @ head.T, -1)
        columns.append(tokens)
        running &= ~torch.isin(tokens, stops)
        if count + 1 == new_tokens or not bool(running.any()):
            break
        hidden = decoder.step(tokens)
    return [_until_eos(row, eos_ids) for row in torch.stack(columns, 1).tolist()]


def served_hidden(replica: Replica, ids: Tensor, prefill: int, *, student: bool, served: bool) -> Tensor:
    """Normalised hidden rows [B, T - prefill, C] of positions prefill .. T - 1 of ids [B, T], fed one at a time after
    an exact pass over the first `prefill` tokens: what a runtime computes.
    """
    decoder = Decoder(replica, student=student, served=served, capacity=ids.shape[1])
    decoder.prompt(ids[:, :prefill])
    return torch.stack([decoder.step(ids[:, t]) for t in range(prefill, ids.shape[1])], 1)


def _until_eos(ids: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in eos_ids]
    return ids[: ends[0] + 1] if ends else ids
