"""A HuggingFace directory: config.json, the tensors of all its safetensors files, and what goes with the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortiq_fcd.errors import CmfFormatError, ConfigError
from cortiq_fcd.io.hf.jsonfile import read_object
from cortiq_fcd.io.hf.safetensors import StoredTensor, read_directory

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class HfDirectory:
    """What is in a directory. `tokenizer` is tokenizer.json as it is, None where there is none."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    tokenizer: bytes | None
    text: Mapping[str, Any]  # `tokenizer_config` of a CMF header


def open_directory(path: Path) -> HfDirectory:
    """Read everything but the payloads. ConfigError for what is missing, CmfFormatError for what is damaged."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such directory", hint="nothing is downloaded: get the model's directory first"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: there is no config.json in it", hint="give the directory of a HuggingFace model")
    config = read_object(path / "config.json")
    tokenizer = path / "tokenizer.json"
    try:
        data = tokenizer.read_bytes() if tokenizer.is_file() else None
    except OSError as error:
        raise ConfigError(f"{tokenizer}: can't be read: {error.strerror}") from error
    return HfDirectory(path, config, _tensors(path), data or None, _text_settings(path, config))


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of every shard, by name."""
    placed = _weight_map(path)
    files = sorted(set(placed.values())) if placed is not None else _lone_files(path)
    found: dict[str, StoredTensor] = {}
    for name in files:
        if not (path / name).is_file():
            raise ConfigError(f"{path / name}: this shard is missing", hint="put all shards into one directory")
        for tensor in read_directory(path / name).values():
            if tensor.name in found:
                other = found[tensor.name].path.name
                raise CmfFormatError(path / name, f"a tensor of this name is also in {other}", tensor=tensor.name)
            found[tensor.name] = tensor
    for tensor_name, file in (placed or {}).items():
        if tensor_name not in found or found[tensor_name].path.name != file:
            raise CmfFormatError(path / INDEX, f"the index names it in {file}, which has none", tensor=tensor_name)
    return found


def _weight_map(path: Path) -> dict[str, str] | None:
    """Tensor to file as the index says it; None without an index. Only plain file names are followed."""
    if not (path / INDEX).is_file():
        return None
    placed = read_object(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CmfFormatError(path / INDEX, "weight_map", expected="an object of tensor names", got=str(placed)[:40])
    for tensor, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            what = "weight_map names something else than a safetensors file of this directory"
            raise CmfFormatError(path / INDEX, what, tensor=tensor, got=str(file)[:80])
    return placed


def _lone_files(path: Path) -> list[str]:
    if (path / SINGLE).is_file():
        return [SINGLE]
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        hint = "only safetensors are read: save the model with transformers' save_pretrained"
        raise ConfigError(f"{path}: there are no safetensors in it", hint=hint)
    return names


def _text_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """chat_template, eos_token_ids, bos_token_id, pad_token_id, as far as the directory tells."""
    tokenizer = _optional(path / "tokenizer_config.json")
    inner = config.get("text_config")
    sources = [_optional(path / "generation_config.json"), config, inner if isinstance(inner, dict) else {}]
    ids = {kind: _token_ids(f"{kind}_token", sources, tokenizer) for kind in ("eos", "bos", "pad")}
    found = {
        "chat_template": _require_text(_chat_template(path, tokenizer), path),
        "eos_token_ids": ids["eos"],
        "bos_token_id": ids["bos"][0] if ids["bos"] else None,
        "pad_token_id": ids["pad"][0] if ids["pad"] else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _token_ids(kind: str, sources: list[Mapping[str, Any]], tokenizer: Mapping[str, Any]) -> list[int]:
    """The ids that the first source gives; else the id of the tokenizer's own token of this kind."""
    for source in sources:
        value = source.get(f"{kind}_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(i) is int and i >= 0 for i in ids):
            return list(ids)
    token = tokenizer.get(kind)
    content = token.get("content") if isinstance(token, dict) else token
    added = tokenizer.get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == content and number.isdecimal():
            return [int(number)]
    return []


def _chat_template(path: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """A file of its own wins, as it does in transformers; of several named templates the default one counts."""
    own = path / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{own}: can't be read: {error}") from error
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _require_text(text: str | None, path: Path) -> str | None:
    """The text, if it can be written: JSON's escapes can hold halves of characters."""
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise CmfFormatError(path / "tokenizer_config.json", "chat_template holds half of a surrogate pair") from None
    return text
