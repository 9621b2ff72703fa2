"""Parts of layers that are read from the file whenever they are visited, so that a model may be larger than memory.

They go into one of two buffers, the next one by a thread while the present one computes. Evaluations, which need no
gradient and no activations, may hold parts as long as there is room; the next training step releases them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.model.layer import LayerWeights
from cortiq_fcd.model.layer_parts import Fill, Matrices, Part, fill_stacked, part_numbers, read_part, with_matrices
from cortiq_fcd.model.plan import ModelPlan


@dataclass
class Room:
    """Bytes that evaluations may fill with streamed weights, for all models of a run together."""

    left: int = 0

    def take(self, nbytes: int) -> bool:
        """Take so much, if there is."""
        fits = nbytes <= self.left
        self.left -= nbytes if fits else 0
        return fits


class Streaming:
    """What completes layers whose `parts` are not in memory."""

    def __init__(
        self, plan: ModelPlan, fill: Fill, device: torch.device, parts: frozenset[Part], room: Room | None = None
    ) -> None:
        self.parts = parts
        self._plan, self._fill = plan, fill
        self._stream = _Stream(plan, fill, device)
        self._held = _Held(room or Room())

    def without(self, parts: frozenset[Part]) -> Streaming:
        """The same, for layers that have these parts; buffers and what is held are shared."""
        other = object.__new__(Streaming)
        other.__dict__.update(self.__dict__, parts=self.parts - parts)
        return other

    def along(
        self, layers: Sequence[LayerWeights], order: Sequence[int | None], *, hold: bool
    ) -> Iterator[LayerWeights | None]:
        """The complete layers in `order`, each valid until the next one is asked for; null where the number is.

        `hold`: keep what is read while there is room.
        """
        for at, i in enumerate(order):
            if i is None:
                yield None
                continue
            found = {part: self._held.parts[part] for part in self._of(i) if part in self._held.parts}
            wanted = self._missing(i)
            if wanted:
                read = self._stream.read(wanted, self._next(order[at + 1 :]))
                if hold:
                    self._held.offer(read)
                found |= read
            yield with_matrices(layers[i], found.get((i, "mixer"), {}), found.get((i, "ffn"), {}))

    def fill_ffn(self, index: int, gate_up: Tensor, down: Tensor) -> None:
        """Read a layer's feed-forward matrices to where they are wanted, past the buffers."""
        layer = self._plan.layers[index]
        fill_stacked(self._plan, self._fill, (layer.gate_proj, layer.up_proj), gate_up)
        self._fill(layer.down_proj, down)

    def release(self) -> None:
        """Let go of what evaluations have held."""
        self._held.release()

    def _of(self, index: int) -> tuple[Part, ...]:
        both: tuple[Part, Part] = ((index, "mixer"), (index, "ffn"))
        return tuple(part for part in both if part in self.parts)

    def _missing(self, index: int) -> tuple[Part, ...]:
        return tuple(part for part in self._of(index) if part not in self._held.parts)

    def _next(self, order: Sequence[int | None]) -> tuple[Part, ...]:
        """What has to be read next."""
        return next((wanted for i in order if i is not None and (wanted := self._missing(i))), ())


class _Held:
    """Parts that were read and may stay."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._nbytes = 0
        self.parts: dict[Part, Matrices] = {}

    def offer(self, read: dict[Part, Matrices]) -> None:
        """Keep copies of parts while there is room."""
        for part, matrices in read.items():
            nbytes = sum(matrix.nbytes for matrix in matrices.values())
            if self._room.take(nbytes):
                self._nbytes += nbytes
                self.parts[part] = {field: matrix.clone() for field, matrix in matrices.items()}

    def release(self) -> None:
        self.parts.clear()
        self._room.left += self._nbytes
        self._nbytes = 0


@dataclass
class _Slot:
    buffer: Tensor
    parts: dict[Part, Matrices]


class _Stream:
    """Two buffers that are read into in turn."""

    def __init__(self, plan: ModelPlan, fill: Fill, device: torch.device) -> None:
        self._plan, self._fill = plan, fill
        self._slots = [_Slot(torch.empty(0, device=device), {}) for _ in range(2)]
        self._last = 0  # the slot in use
        self._thread = ThreadPoolExecutor(1, "weights")
        self._reading: Future[None] | None = None

    def read(self, parts: tuple[Part, ...], following: tuple[Part, ...]) -> dict[Part, Matrices]:
        """The matrices of some parts, in memory until the next call; meanwhile the parts that follow are read."""
        self._finish()
        found = self._where(parts)
        if found is None:
            found = 1 - self._last
            self._load(self._slots[found], parts)
        self._last = found
        if following and self._where(following) is None:
            self._reading = self._thread.submit(self._load, self._slots[1 - found], following)
        return {part: self._slots[found].parts[part] for part in parts}

    def _finish(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.result()

    def _where(self, parts: tuple[Part, ...]) -> int | None:
        return next((k for k, slot in enumerate(self._slots) if all(part in slot.parts for part in parts)), None)

    def _load(self, slot: _Slot, parts: tuple[Part, ...]) -> None:
        slot.parts = {}
        numbers = [part_numbers(self._plan, part) for part in parts]
        if slot.buffer.numel() < sum(numbers):
            slot.buffer = slot.buffer.new_empty(0)  # the old one goes first
            slot.buffer = slot.buffer.new_empty(sum(numbers))
        pieces = torch.split(slot.buffer[: sum(numbers)], numbers)
        slot.parts = {
            part: read_part(self._plan, self._fill, part, piece) for part, piece in zip(parts, pieces, strict=True)
        }
