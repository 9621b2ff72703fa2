"""Parts of layers that are fetched whenever they are visited, so that a model may be larger than memory.

They go into one of two buffers, the next one while the present one computes. Evaluations, which need no gradient and no
activations, may hold parts as long as there is room; the next training step releases them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

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


class Source(Protocol):
    """Where parts come from."""

    def read(self, parts: tuple[Part, ...], following: tuple[Part, ...]) -> dict[Part, Matrices]:
        """The matrices of some parts, in memory until the next call; meanwhile the parts that follow are fetched."""

    def any_rank(self, wanted: bool) -> bool:
        """Whether another pass over the layers is wanted: by this rank, or by any that this source needs for it."""


class Streaming:
    """What completes layers whose `parts` are not in memory."""

    def __init__(
        self,
        plan: ModelPlan,
        fill: Fill,
        device: torch.device,
        parts: frozenset[Part],
        room: Room | None = None,
        source: Source | None = None,
    ) -> None:
        """`source`: where parts come from, by default the file that `fill` reads."""
        self.parts = parts
        self.source = source or _FromFile(plan, fill, device)
        self._plan, self._fill = plan, fill
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
                read = self.source.read(wanted, self._next(order[at + 1 :]))
                if hold:
                    self._held.offer(read)
                found |= read
            yield with_matrices(layers[i], found.get((i, "mixer"), {}), found.get((i, "ffn"), {}))

    def fill_ffn(self, index: int, gate_up: Tensor, down: Tensor) -> None:
        """Read a layer's feed-forward matrices from the file to where they are wanted, past the buffers."""
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


class Slots:
    """Two buffers that are filled in turn, and which parts are in them."""

    def __init__(self, device: torch.device) -> None:
        self._parts: list[tuple[Part, ...]] = [(), ()]
        self._buffers = [torch.empty(0, device=device) for _ in range(2)]
        self._last = 0  # the one in use

    def take(self, parts: tuple[Part, ...]) -> tuple[int, bool]:
        """The buffer to use for these parts, and whether it has to be filled first."""
        self._last, missing = self._find(parts)
        return self._last, missing

    def prepare(self, parts: tuple[Part, ...]) -> int | None:
        """The buffer to fill with parts that come next, beside the one in use; null if there is nothing to do."""
        at, missing = self._find(parts)
        return at if missing else None

    def buffer(self, at: int, numbers: int) -> Tensor:
        """Room in a buffer."""
        if self._buffers[at].numel() < numbers:
            self._buffers[at] = self._buffers[at].new_empty(0)  # the old one goes first
            self._buffers[at] = self._buffers[at].new_empty(numbers)
        return self._buffers[at][:numbers]

    def _find(self, parts: tuple[Part, ...]) -> tuple[int, bool]:
        for at, there in enumerate(self._parts):
            if set(parts) <= set(there):
                return at, False
        at = 1 - self._last
        self._parts[at] = parts
        return at, True


class _FromFile:
    """Parts that are read from the file, the next ones by a thread."""

    def __init__(self, plan: ModelPlan, fill: Fill, device: torch.device) -> None:
        self._plan, self._fill = plan, fill
        self._slots = Slots(device)
        self._matrices: list[dict[Part, Matrices]] = [{}, {}]
        self._thread = ThreadPoolExecutor(1, "weights")
        self._reading: Future[None] | None = None

    def read(self, parts: tuple[Part, ...], following: tuple[Part, ...]) -> dict[Part, Matrices]:
        """See `Source`."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.result()
        at, missing = self._slots.take(parts)
        if missing:
            self._load(at, parts)
        ahead = self._slots.prepare(following)
        if ahead is not None:
            self._reading = self._thread.submit(self._load, ahead, following)
        return {part: self._matrices[at][part] for part in parts}

    def any_rank(self, wanted: bool) -> bool:
        """See `Source`: every rank has its own file."""
        return wanted

    def _load(self, at: int, parts: tuple[Part, ...]) -> None:
        self._matrices[at] = {}
        numbers = [part_numbers(self._plan, part) for part in parts]
        pieces = torch.split(self._slots.buffer(at, sum(numbers)), numbers)
        self._matrices[at] = {
            part: read_part(self._plan, self._fill, part, piece) for part, piece in zip(parts, pieces, strict=True)
        }
