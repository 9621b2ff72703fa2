"""Decoding one token at a time: exact layers with a key-value cache, converted layers with the served O(1) state.

A prompt pass is exact everywhere; then converted layers are sealed (unless the prompt is too short for that, and they
stay exact for ever). Sequences of a batch move in step, so their prompts have the same length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cortiq_fcd.kernels import causal_attention, gated_delta_net
from cortiq_fcd.kernels.o1_stream import StreamState, seal_stream, stream_step
from cortiq_fcd.model import attention, delta_net
from cortiq_fcd.model.attention import Angles, AttentionWeights
from cortiq_fcd.model.conversion import is_exact, landmark_count
from cortiq_fcd.model.delta_net import DeltaNetWeights
from cortiq_fcd.model.layer import LayerWeights, embed, feed_forward, input_norm
from cortiq_fcd.model.replica import Replica, final_norm, head_rows, rotations, visits


@dataclass
class KvCache:
    """Keys and values so far: buffers [B, G, capacity, D], of which the first `length` rows are filled."""

    k: Tensor
    v: Tensor
    length: int


State: TypeAlias = StreamState | KvCache | gated_delta_net.State


class Decoder:
    """A batch of sequences being decoded through one model; `position` tokens have been seen."""

    def __init__(self, replica: Replica, *, student: bool, served: bool, capacity: int) -> None:
        """`student`: the masters, else the teacher. `served`: converted layers run the O(1) kernel.

        `capacity` is the largest number of tokens, prompt included.
        """
        self.weights = replica.student if student else replica.teacher
        self.position = 0
        self._conversion = replica.conversion
        self._served = served
        self._capacity = capacity
        self._angles = rotations(self.weights, capacity)
        self._order = list(visits(self.weights.plan))
        self._states: list[State] = []

    def prompt(self, ids: Tensor) -> Tensor:
        """The exact pass over prompts ids [B, T]; what the head multiplies, [B, C], of their last tokens."""
        batch, length = ids.shape
        angles = self._positions(0, length)
        x = embed(ids, self.weights.embed, self.weights.plan.embed_multiplier)
        for i, layer in self._layers():
            x = self._between(x) if layer is None else self._layer_prompt(i, x, layer, angles, batch)
        self.position = length
        return head_rows(x.view(batch, length, -1)[:, -1], self.weights)

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token of each sequence, tokens [B]; what the head multiplies, [B, C]."""
        angles = self._positions(self.position, self.position + 1)
        x = embed(tokens, self.weights.embed, self.weights.plan.embed_multiplier)
        states = iter(self._states)
        for _, layer in self._layers():
            x = self._between(x) if layer is None else self._layer_step(x, layer, next(states), angles)
        self.position += 1
        return head_rows(x, self.weights)

    def known(self, ids: Tensor, prefill: int) -> Tensor:
        """`prompt` of the first `prefill` ids [B, T], then `step` for each of the others: [B, T - prefill, C] in all.

        As no token depends on what the head says, all of them go through a layer before the next one is visited.
        """
        batch = ids.shape[0]
        positions = range(prefill, ids.shape[1])
        prompt_angles = self._positions(0, prefill)
        angles = [self._positions(t, t + 1) for t in positions]
        x, *rows = (
            embed(part, self.weights.embed, self.weights.plan.embed_multiplier)
            for part in (ids[:, :prefill], *(ids[:, t] for t in positions))
        )
        for i, layer in self._layers():
            if layer is None:
                x, rows = self._between(x), [self._between(row) for row in rows]
                continue
            x = self._layer_prompt(i, x, layer, prompt_angles, batch)
            state = self._states.pop()
            for t, row in enumerate(rows):
                rows[t] = self._layer_step(row, layer, state, angles[t])
        return torch.stack([head_rows(row, self.weights) for row in rows], 1)

    def _between(self, x: Tensor) -> Tensor:
        """From one loop of a looped model to the next."""
        return final_norm(x, self.weights)[0]

    def _positions(self, start: int, stop: int) -> Angles:
        return {plan: rotation.rows(start, stop) for plan, rotation in self._angles.items()}

    def _layers(self) -> Iterator[tuple[int, LayerWeights | None]]:
        """Every visit of a pass: a layer with its number, or null between two loops."""
        for i, layer in zip(self._order, self.weights.along(self._order, hold=True), strict=True):
            yield (0 if i is None else i), layer

    def _layer_prompt(self, index: int, x: Tensor, layer: LayerWeights, angles: Angles, batch: int) -> Tensor:
        n1, _ = input_norm(x, layer)
        if isinstance(layer.mixer, DeltaNetWeights):
            mixed, state, _ = delta_net.delta_net_fwd(n1, layer.mixer, batch)
            self._states.append(state)
        else:
            heads = attention.project(n1, layer.mixer, angles, batch)
            out, _ = attention.exact(heads, layer.mixer.plan)
            self._states.append(self._seal(index, heads, layer.mixer))
            mixed, _ = attention.project_out(out, heads.gate, layer.mixer)
        return feed_forward(mixed.add_(x), layer)[0]

    def _layer_step(self, x: Tensor, layer: LayerWeights, state: State, angles: Angles) -> Tensor:
        n1, _ = input_norm(x, layer)
        if isinstance(layer.mixer, DeltaNetWeights):
            assert isinstance(state, gated_delta_net.State)
            mixed = delta_net.delta_net_step(n1, state, layer.mixer)
        else:
            assert not isinstance(state, gated_delta_net.State)
            mixed = _attention_step(n1, layer.mixer, state, angles)
        return feed_forward(mixed.add_(x), layer)[0]

    def _seal(self, index: int, heads: attention.Heads, weights: AttentionWeights) -> StreamState | KvCache:
        setting, k, v = self._conversion, heads.k, heads.v
        length = k.shape[2]
        if self._served and index in setting.converted and not is_exact(length, setting.w, setting.sink):
            return seal_stream(
                heads.q,
                k,
                v,
                landmark_count=landmark_count(length, setting.m),
                window=setting.w,
                sink=setting.sink,
                scale=weights.plan.scale,
            )
        room = (*k.shape[:2], self._capacity - length)
        return KvCache(
            torch.cat((k, k.new_zeros(*room, k.shape[3])), 2), torch.cat((v, v.new_zeros(*room, v.shape[3])), 2), length
        )


def _attention_step(n1: Tensor, weights: AttentionWeights, state: StreamState | KvCache, angles: Angles) -> Tensor:
    """y [B, C] of one more position n1 [B, C]; the state moves on."""
    plan = weights.plan
    heads = attention.project(n1, weights, angles, n1.shape[0])
    q, k, v = heads.q.squeeze(3), heads.k.squeeze(2), heads.v.squeeze(2)
    if isinstance(state, StreamState):
        out = stream_step(state, q, k, v)
    else:
        state.k[:, :, state.length], state.v[:, :, state.length] = k, v
        state.length += 1
        seen = slice(0 if plan.window is None else max(0, state.length - plan.window), state.length)
        out = causal_attention.causal_attention_step(
            q, state.k[:, :, seen], state.v[:, :, seen], plan.scale, softcap=plan.softcap
        )
    return attention.project_out(out.unsqueeze(3), heads.gate, weights)[0]


def greedy(
    replica: Replica, prompts: Tensor, new_tokens: int, eos_ids: tuple[int, ...], *, student: bool, served: bool
) -> list[list[int]]:
    """Greedy continuations of prompts [B, T]: at most `new_tokens` ids each; an eos id ends one and counts.

    Ranks that have a model in common go on together, until none wants another token.
    """
    decoder = Decoder(replica, student=student, served=served, capacity=prompts.shape[1] + new_tokens)
    # Neither a soft cap nor a positive multiplier moves the largest logit.
    head = decoder.weights.head
    hidden = decoder.prompt(prompts)
    columns: list[Tensor] = []
    running = torch.ones(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    stops = torch.tensor(eos_ids, dtype=torch.int64, device=prompts.device)
    for count in range(new_tokens):
        # Rows that have ended keep their place in the batch; what they say after their eos is cut off below.
        tokens = torch.argmax(hidden @ head.T, -1)
        columns.append(tokens)
        running &= ~torch.isin(tokens, stops)
        if count + 1 == new_tokens or not decoder.weights.any_rank(bool(running.any())):
            break
        hidden = decoder.step(tokens)
    return [_until_eos(row, eos_ids) for row in torch.stack(columns, 1).tolist()]


def served_hidden(replica: Replica, ids: Tensor, prefill: int, *, student: bool, served: bool) -> Tensor:
    """What the head multiplies, [B, T - prefill, C], at positions prefill .. T - 1 of ids [B, T], fed one by one after
    an exact pass over the first `prefill` tokens: what a runtime computes.
    """
    return Decoder(replica, student=student, served=served, capacity=ids.shape[1]).known(ids, prefill)


def _until_eos(ids: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in eos_ids]
    return ids[: ends[0] + 1] if ends else ids
