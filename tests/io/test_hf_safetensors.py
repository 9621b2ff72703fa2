"""Safetensors files without trust: what the library wrote comes back exactly, what is damaged has a typed error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cortiq_fcd.errors import CmfFormatError, ConfigError, CortiqError, NonFiniteWeightsError, UnsupportedModelError
from cortiq_fcd.io.hf import safetensors
from cortiq_fcd.io.hf.directory import open_directory
from cortiq_fcd.io.hf.safetensors import read_directory


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_of_the_library(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 64)  # several pieces
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in (("b", (7, 5)), ("a", (3,)), ("c", ()))}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_directory(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        weights = found[name].read()
        assert weights.dtype == np.float32
        assert weights.shape == array.shape
        assert np.array_equal(weights, array.astype(np.float32))


def test_bfloat16_bit_by_bit(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    path = write_file(tmp_path / "x", {"w": entry("BF16", [256, 256], 0, 1 << 17)}, bits.tobytes())
    weights = read_directory(path)["w"].read()
    assert np.array_equal(weights.reshape(-1).view(np.uint32), bits.astype(np.uint32) << 16)


def test_a_double_beyond_f32_is_told_and_not_made_infinite(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x", {"w": entry("F64", [2], 0, 16)}, np.array([1.0, 1e300]).tobytes())
    with pytest.raises(NonFiniteWeightsError, match="flat index 1") as caught:
        read_directory(path)["w"].read()
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "F4", "Q9"])
def test_what_holds_no_floats_is_refused_when_used(tmp_path: Path, dtype: str) -> None:
    path = write_file(tmp_path / "x", {"w": entry(dtype, [4], 0, 4)}, bytes(4))
    with pytest.raises(UnsupportedModelError, match=dtype) as caught:
        read_directory(path)["w"].read()
    assert caught.value.subject == "w"


GOOD = entry("F32", [2], 0, 8)
HOSTILE: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{]", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "an array": (b"[]  ", b"", "an object"),
    "a doubled name": (b'{"w": 1, "w": 2}', b"", "twice"),
    "too deep": (b"[" * 100_000, b"", "not valid JSON"),
    "an entry that is no object": ({"w": 3}, b"", "header entry"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "header entry"),
    "a negative size": ({"w": entry("F32", [-2], 0, 8)}, bytes(8), "shape"),
    "a size that is no number": ({"w": entry("F32", ["2"], 0, 8)}, bytes(8), "shape"),  # type: ignore[list-item]
    "a boolean size": ({"w": entry("F32", [True, 2], 0, 8)}, bytes(8), "shape"),
    "seven dimensions": ({"w": entry("F32", [1, 1, 1, 1, 1, 1, 2], 0, 8)}, bytes(8), "shape"),
    "offsets backwards": ({"w": entry("F32", [2], 8, 0)}, bytes(8), "data_offsets"),
    "offsets past the end": ({"w": entry("F32", [4], 0, 16)}, bytes(8), "data_offsets"),
    "huge offsets": ({"w": entry("F32", [2], 0, 1 << 70)}, bytes(8), "data_offsets"),
    "three offsets": ({"w": {**GOOD, "data_offsets": [0, 4, 8]}}, bytes(8), "data_offsets"),
    "another length than the shape's": ({"w": entry("F32", [3], 0, 8)}, bytes(8), "wrong length"),
    "a shape that overflows": ({"w": entry("F32", [1 << 31] * 6, 0, 8)}, bytes(8), "wrong length"),
    "overlap": ({"a": GOOD, "b": entry("F32", [2], 4, 12)}, bytes(12), "overlap"),
    "a gap": ({"a": GOOD, "b": entry("F32", [1], 12, 16)}, bytes(16), "gap"),
    "bytes behind the data": ({"w": GOOD}, bytes(9), "does not end"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(tmp_path: Path, case: str) -> None:
    header, data, words = HOSTILE[case]
    path = write_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CmfFormatError, match=words) as caught:
        read_directory(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("length", [0, 1, 2, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_lengths_of_the_header(tmp_path: Path, length: int) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", length) + b" ")
    with pytest.raises(CmfFormatError, match="length"):
        read_directory(tmp_path / "x")


def test_files_cut_anywhere(tmp_path: Path) -> None:
    whole = write_file(tmp_path / "x", {"w": GOOD}, bytes(8)).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "y").write_bytes(whole[:length])
        with pytest.raises(CmfFormatError):
            read_directory(tmp_path / "y")


def test_a_file_cut_while_open(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x", {"w": GOOD}, bytes(8))
    tensor = read_directory(path)["w"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CmfFormatError, match="shorter"):
        tensor.read()
    path.unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        tensor.read()
    with pytest.raises(ConfigError, match="can't be read"):
        read_directory(path)


@settings(deadline=None, max_examples=150)
@given(place=st.integers(0, 200), byte=st.integers(0, 255), data=st.data())
def test_one_changed_byte_gives_tensors_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    header = {"a": GOOD, "b": entry("BF16", [2, 2], 8, 16), "__metadata__": {"format": "pt"}}
    octets = bytearray(write_file(path, header, bytes(16)).read_bytes())
    octets[place % len(octets)] = byte
    path.write_bytes(octets)
    try:
        for tensor in read_directory(path).values():
            tensor.read()
    except CortiqError:
        pass


CONFIG = b'{"model_type": "llama"}'


def shards(folder: Path) -> None:
    (folder / "config.json").write_bytes(CONFIG)
    write_file(folder / "model-1.safetensors", {"a": GOOD}, bytes(8))
    write_file(folder / "model-2.safetensors", {"b": GOOD}, bytes(8))


def index(folder: Path, placed: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), encoding="utf-8")


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path)
    assert open_directory(tmp_path).tensors.keys() == {"a", "b"}
    index(tmp_path, {"a": "model-1.safetensors"})
    assert open_directory(tmp_path).tensors.keys() == {"a"}  # the index says which files are the model's


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ({"a": "../model-1.safetensors"}, "something else"),
        ({"a": "/etc/passwd"}, "something else"),
        ({"a": "model-1.bin"}, "something else"),
        ({"a": 3}, "something else"),
        ({}, "weight_map"),
        (["a"], "weight_map"),
        ({"a": "model-2.safetensors"}, "has none"),
        ({"a": "model-1.safetensors", "c": "model-2.safetensors"}, "has none"),
        ({"a": "model-3.safetensors"}, "missing"),
    ],
)
def test_a_wrong_index(tmp_path: Path, placed: Any, words: str) -> None:
    shards(tmp_path)
    index(tmp_path, placed)
    with pytest.raises((CmfFormatError, ConfigError), match=words):
        open_directory(tmp_path)


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    write_file(tmp_path / "model-2.safetensors", {"a": GOOD}, bytes(8))
    with pytest.raises(CmfFormatError, match="also in model-1"):
        open_directory(tmp_path)


def test_what_is_no_model_directory(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            open_directory(folder)
        assert caught.value.hint

    refused(tmp_path / "missing", "no such directory")
    refused(tmp_path, "no config.json")
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "no safetensors")
    (tmp_path / "config.json").write_bytes(b"{nonsense")
    with pytest.raises(CmfFormatError, match="not valid JSON"):
        open_directory(tmp_path)
