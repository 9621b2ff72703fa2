"""A HuggingFace directory as the plan of a CMF file: header, tensors in the order of execution, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from cortiq_fcd.io import layout, writer
from cortiq_fcd.io.hf.directory import HfDirectory
from cortiq_fcd.io.hf.encoding import peak_bytes, weights_or_payload
from cortiq_fcd.io.hf.families import describe, record
from cortiq_fcd.io.hf.names import Placed, place
from cortiq_fcd.io.hf.quantization import Chosen, choose
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.planned import PlannedModel
from cortiq_fcd.io.reader import TensorRecord
from cortiq_fcd.io.writer import payload_bounds

RECORDED = "huggingface"  # key of provenance


@dataclass
class Import:
    """What will be written. It has the shape that a model's plan is made from (`header`, `tensors`,
    `required_features`), so that a model that can't be run is refused before anything is written.
    """

    header: dict[str, Any]
    tensors: Mapping[str, Placed]
    dtypes: Mapping[str, Chosen]
    vocab: bytes | None
    notes: tuple[str, ...]
    required_features: int = layout.FEATURE_DIRECTORY

    def with_notes(self, notes: Iterable[str]) -> Import:
        """The same with more to tell."""
        return replace(self, notes=(*self.notes, *notes))

    def write(self, out: Path, *, force: bool) -> writer.WrittenFile:
        """Write it, one tensor in memory at a time; errors as `writer.create_model`, and those of `Placed.read`."""
        return writer.create_model(out, header=self.header, tensors=self._payloads(), vocab=self.vocab, force=force)

    def as_model(self, path: Path, *, largest: bool = False) -> PlannedModel:
        """The file at `path` before it is written. `largest`: payloads whose size depends on the weights take the most
        that is possible, instead of the least.
        """
        records = {
            name: TensorRecord(name, dtype, tensor.shape, payload_bounds(dtype, tensor.shape)[largest], 0, 0, path)
            for name, tensor in self.tensors.items()
            for dtype in [self.dtypes[name].dtype]
        }
        sections = {layout.VOCAB: self.vocab} if self.vocab else {}
        return PlannedModel(path, self.header, self.required_features, records, sections)

    def memory_bytes(self) -> int:
        """The most that writing allocates at once: one tensor after the other."""
        return max(
            peak_bytes(tensor, dtype, payload_bounds(dtype, tensor.shape)[1])
            for name, tensor in self.tensors.items()
            for dtype in [self.dtypes[name].dtype]
        )

    def _payloads(self) -> Iterator[tuple[str, DType, tuple[int, ...], Callable[[], npt.NDArray[Any]]]]:
        for name, tensor in self.tensors.items():
            dtype = self.dtypes[name].dtype
            yield name, dtype, tensor.shape, partial(weights_or_payload, tensor, dtype)


def plan_import(directory: HfDirectory, quant: DType, o1: Mapping[str, Any] | None = None) -> Import:
    """Plan the file; `o1` is its provenance.o1_attn. UnsupportedModelError names what can't be converted."""
    described = describe(directory.config)
    placement = place(described, directory.tensors)
    tensors = {tensor.name: tensor for tensor in placement.tensors}
    dtypes = {name: choose(tensor, quant) for name, tensor in tensors.items()}
    rope = record(described.rope)
    provenance = {**({"o1_attn": dict(o1)} if o1 else {}), **({RECORDED: rope} if rope else {})}
    header: dict[str, Any] = {
        "format": "cmf",
        "version": layout.VERSION,
        "arch": {**described.arch, "tie_word_embeddings": placement.tied},
        "quant_type": quant.label,
        **({"provenance": provenance} if provenance else {}),
        "tokenizer_config": dict(directory.text),
    }
    notes = (*described.notes, *placement.notes, *_notes(directory, dtypes))
    return Import(header, tensors, dtypes, directory.tokenizer, notes)


def _notes(directory: HfDirectory, dtypes: Mapping[str, Chosen]) -> Iterator[str]:
    if directory.tokenizer is None:
        yield f"{directory.path} has no tokenizer.json: the file will have no tokenizer"
    for name, chosen in dtypes.items():
        if chosen.instead_of is not None:
            yield f"{name} is {chosen.dtype.label} instead of {chosen.instead_of.label}: {chosen.why}"
