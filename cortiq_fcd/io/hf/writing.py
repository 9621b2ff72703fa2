"""Writes a planned export: the directory appears whole or not at all, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from cortiq_fcd.errors import ConfigError, NonFiniteWeightsError, ResourceError
from cortiq_fcd.io.atomic import check_free_space
from cortiq_fcd.io.codecs import CODECS, EncodeError
from cortiq_fcd.io.hf.directory import INDEX, SINGLE
from cortiq_fcd.io.hf.exporting import Export, Exported, weights_bytes
from cortiq_fcd.io.layout import DType

DTYPES: Mapping[str, tuple[DType, str, int]] = {
    "f32": (DType.F32, "F32", 4),
    "f16": (DType.F16, "F16", 2),
    "bf16": (DType.BF16, "BF16", 2),
}
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class WrittenDirectory:
    """What was written; `bytes` is the size of the weights."""

    path: Path
    bytes: int
    tensors: int
    shards: int


def check_directory(out: Path) -> None:
    """ConfigError unless `out` is free for a new directory: nothing there, or an empty one."""
    if out.is_dir() and not out.is_symlink():
        if any(out.iterdir()):
            raise ConfigError(f"{out}: there are files in it", hint="name a new or an empty directory")
    elif os.path.lexists(out):
        raise ConfigError(f"{out}: is there and is no directory", hint="name a new directory")
    elif not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {out.parent}", hint=f"mkdir -p {out.parent}")


def write_export(export: Export, out: Path, dtype: str, text: Any) -> WrittenDirectory:
    """Write the directory; `text` is the header's tokenizer_config.

    ConfigError as `check_directory` and for weights that f16 can't hold, NonFiniteWeightsError for NaN and Inf,
    ResourceError for a disk that is full or can't be written, CmfFormatError for a damaged source. On any of them,
    and when interrupted, nothing is left.
    """
    check_directory(out)
    out = out.absolute()
    check_free_space(out, weights_bytes(export.tensors, DTYPES[dtype][2]))
    partial = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.mkdir()
        shards = _write_weights(export.tensors, partial, dtype)
        for name, content in {**export.files, **_tokenizer_files(export, text)}.items():
            _write(partial / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        if export.tokenizer:
            _write(partial / "tokenizer.json", export.tokenizer)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise ResourceError(f"{out}: can't be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return WrittenDirectory(out, weights_bytes(export.tensors, DTYPES[dtype][2]), len(export.tensors), shards)


def _write_weights(tensors: Sequence[Exported], folder: Path, dtype: str) -> int:
    """One file, or shards with an index; their number."""
    shards = list(_shards(tensors, DTYPES[dtype][2]))
    if len(shards) == 1:
        _write_shard(shards[0], folder / SINGLE, dtype)
        return 1
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(shard, folder / name, dtype)
        placed |= {tensor.name: name for tensor in shard}
    total = weights_bytes(tuple(tensors), DTYPES[dtype][2])
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    _write(folder / INDEX, json.dumps(index, indent=2).encode())
    return len(shards)


def _shards(tensors: Sequence[Exported], item_bytes: int) -> Iterator[list[Exported]]:
    shard: list[Exported] = []
    room = SHARD_BYTES
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * item_bytes
        if shard and nbytes > room:
            yield shard
            shard, room = [], SHARD_BYTES
        shard.append(tensor)
        room -= nbytes
    yield shard


def _write_shard(tensors: Sequence[Exported], path: Path, dtype: str) -> None:
    _, label, item_bytes = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + math.prod(tensor.shape) * item_bytes
        header[tensor.name] = {"dtype": label, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(_encoded(tensor, path, DTYPES[dtype][0]))
        file.flush()
        os.fsync(file.fileno())


def _encoded(tensor: Exported, path: Path, dtype: DType) -> memoryview:
    encode = CODECS[dtype].encode
    if encode is None:
        raise ValueError(f"{dtype.label} can't be written")
    try:
        return encode(tensor.read()).data
    except EncodeError as error:
        if error.nonfinite:
            raise NonFiniteWeightsError(path, f"not written: {error.what}", tensor=tensor.name) from None
        hint = "export as f32 or bf16"
        raise ConfigError(f"tensor {tensor.name!r}: {error.what}", hint=hint) from None


def _tokenizer_files(export: Export, text: Any) -> dict[str, dict[str, Any]]:
    """tokenizer_config.json: what makes transformers load tokenizer.json as it is, with template and special tokens."""
    if not export.tokenizer:
        return {}
    text = text if isinstance(text, dict) else {}
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(text.get("chat_template"), str):
        found["chat_template"] = text["chat_template"]
    eos = text.get("eos_token_ids") or [None]
    for kind, number in (("bos", text.get("bos_token_id")), ("eos", eos[0]), ("pad", text.get("pad_token_id"))):
        token = _token(export.tokenizer, number)
        if token is not None:
            found[f"{kind}_token"] = token
    return {"tokenizer_config.json": found}


def _token(tokenizer: bytes, number: Any) -> str | None:
    if type(number) is not int or number < 0:
        return None
    try:
        token: str | None = tokenizers.Tokenizer.from_buffer(tokenizer).id_to_token(number)
    except Exception:  # the library raises bare Exception for a tokenizer.json that it does not understand
        return None
    return token


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
