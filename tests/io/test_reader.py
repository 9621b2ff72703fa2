"""Opening: every rule of the format broken once, shards, sections, and what a closed model still allows."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.errors import CmfFormatError, ConfigError
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from tests.io import plain_codecs
from tests.io.hand_rolled import ARCH, DECODABLE, HEADER, Layout, Tensor, pack, small_model


def weight(name: str | bytes = "w", **overrides: Any) -> Tensor:
    return Tensor(name, overrides.pop("dtype", 0), overrides.pop("shape", (4, 8)), bytes(range(128)), **overrides)


def put(tmp_path: Path, plan: Layout | bytes, name: str = "model.cmf") -> Path:
    path = tmp_path / name
    path.write_bytes(plan if isinstance(plan, bytes) else pack(plan))
    return path


def refused(path: Path) -> CmfFormatError:
    with pytest.raises(CmfFormatError) as caught:
        open_model(path)
    assert caught.value.path == str(path)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    return caught.value


def test_a_file_packed_by_hand(tmp_path: Path) -> None:
    plan = small_model(np.random.default_rng(0))
    path = put(tmp_path, plan)
    with open_model(path) as model:
        assert list(model.tensors) == [tensor.name for tensor in plan.tensors]
        assert model.bytes_total == path.stat().st_size
        assert model.required_features == 7
        assert model.arch == ARCH
        assert {name: model.section(name) for name in ("masks", "vocab", "index")} == plan.sections
        for tensor in plan.tensors:
            record = model.tensors[str(tensor.name)]
            assert (record.dtype, record.shape, record.nbytes) == (tensor.dtype, tensor.shape, len(tensor.payload))
            assert record.path == path
            assert path.read_bytes()[record.offset_bytes :][: record.nbytes] == tensor.payload
            assert model.raw(record.name).tobytes() == tensor.payload
            assert b"".join(bytes(piece) for piece in model.chunks(record.name)) == tensor.payload
            assert not model.raw(record.name).flags.writeable
            if record.dtype.label in DECODABLE:
                expected = plain_codecs.decode(record.dtype.label, tensor.payload, tensor.shape)
                assert np.array_equal(model.decode(record.name), expected, equal_nan=True)


def test_no_tensors_and_no_sections(tmp_path: Path) -> None:
    with open_model(put(tmp_path, Layout())) as model:
        assert model.tensors == {}
        assert model.section("masks") is None


def test_odd_but_valid_shapes(tmp_path: Path) -> None:
    tensors = [
        Tensor("scalar", 0, (), bytes(4)),
        Tensor("empty", 0, (3, 0, 2), b""),
        Tensor("six", 0, (1, 2, 1, 2, 1, 3), bytes(48)),
        Tensor("", 0, (1,), bytes(4)),
        Tensor("name\n\0'ключ'", 0, (1,), bytes(4)),
    ]
    with open_model(put(tmp_path, Layout(tensors))) as model:
        assert [model.decode(name).shape for name in model.tensors] == [(), (3, 0, 2), (1, 2, 1, 2, 1, 3), (1,), (1,)]


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_model(tmp_path / "none.cmf")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):  # and does not wait for a writer
        open_model(tmp_path / "pipe")


BIG = 2**64 - 1
DATA_FIELD, HEADER_FIELD, DIR_FIELD = 0x30, 0x10, 0x20
BROKEN: dict[str, tuple[Layout, str, str | None]] = {
    "magic": (Layout(magic=b"CMF\x02"), "at byte 0: not a CMF file", None),
    "version": (Layout(version=3), "unknown version", None),
    "feature_bit_3": (Layout(features=1 | 8), "required_features bits", None),
    "feature_bit_4": (Layout(features=1 | 16), "required_features bits", None),
    "feature_bit_31": (Layout(features=1 | 1 << 31), "required_features bits", None),
    "no_directory_bit": (Layout(features=0), "lacks bit 0", None),
    "no_header": (Layout(spans={"header": (0, 0)}), "header section is missing", None),
    "no_directory": (Layout(spans={"dir": (0, 0)}), "dir section is missing", None),
    "section_in_envelope": (Layout(spans={"vocab": (127, 2)}), "inside the envelope", None),
    "section_past_end": (Layout(spans={"vocab": (200, 10**6)}), "passes the end of the file", None),
    "section_overflow": (Layout(spans={"masks": (BIG - 5, 10)}), "passes the end of the file", None),
    "section_huge": (Layout(spans={"data": (4096, BIG)}), "passes the end of the file", None),
    "data_unaligned": (Layout([weight()], spans={"data": (4096 + 64, 64)}), "not aligned", None),
    "header_hash": (Layout(header_hash=1), "hash of the header", None),
    "directory_hash": (Layout(dir_hash=1), "hash of the dir", None),
    "directory_of_8_bytes": (Layout(spans={"dir": (200, 8)}, dir_hash=0), "ends inside its head", None),
    "count_huge": (Layout([weight()], count=BIG), "passes its end", None),
    "count_overflow": (Layout([weight()], count=2**61), "passes its end", None),
    "pool_in_records": (Layout([weight()], pool_off=71), "name pool", None),
    "pool_past_end": (Layout([weight()], pool_off=10**6), "name pool", None),
    "name_past_end": (Layout([weight(name_off=1)]), "tensor name passes", None),
    "name_off_huge": (Layout([weight(name_off=2**32 - 1)]), "tensor name passes", None),
    "name_not_utf8": (Layout([weight(b"\xff\xfe")]), "not UTF-8", None),
    "name_twice": (Layout([weight(), weight()]), "two tensors of this name", "w"),
    "dtype_17": (Layout([weight(dtype=17)]), "unknown dtype", "w"),
    "dtype_255": (Layout([weight(dtype=255)]), "unknown dtype", "w"),
    "ndim_7": (Layout([weight(ndim=7)]), "too many dimensions", "w"),
    "shape_tail": (Layout([weight(ndim=1)]), "behind its 1 dimensions", "w"),
    "shape_product": (Layout([weight(shape=(2**32 - 1,) * 6)]), "product overflows", "w"),
    "shape_product_of_empty": (Layout([weight(shape=(2**32 - 1,) * 5 + (0,))]), "product overflows", "w"),
    "shape_wraps_to_length": (Layout([weight(shape=(2**31, 2**31, 4))]), "product overflows", "w"),
    "offset_unaligned": (Layout([weight(off=32), weight("v")]), "payload is not aligned", "w"),
    "offset_huge": (Layout([weight(off=BIG - 63)]), "passes the end of the data section", "w"),
    "length_huge": (Layout([weight(nbytes=BIG)]), "passes the end of the data section", "w"),
    "length_short": (Layout([weight(nbytes=127)]), "wrong payload length", "w"),
    "length_long": (Layout([weight(nbytes=129), weight("v")]), "wrong payload length", "w"),
    "no_data_section": (Layout([weight(off=0)]), "passes the end of the data section", "w"),
    "q4_tiled_of_odd_columns": (Layout([weight(dtype=11)]), "whole groups of columns", "w"),
    "vbit_width": (Layout([weight(dtype=8, shape=(1, 32))]), "width of row 0", "w"),
    "q1s_count": (Layout([weight(dtype=13, shape=(1, 32))]), "wrong payload length", "w"),
    "q1t_ends_early": (Layout([weight(dtype=14, shape=(64, 32))]), "ends before the last row pointer", "w"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_is_checked(name: str, tmp_path: Path) -> None:
    plan, message, tensor = BROKEN[name]
    error = refused(put(tmp_path, plan))
    assert message in error.message
    assert error.tensor == tensor
    assert error.offset_bytes is not None
    assert len(error.message) < 400


@pytest.mark.parametrize("length", [0, 1, 3, 127])
def test_shorter_than_an_envelope(length: int, tmp_path: Path) -> None:
    assert "ends inside the envelope" in refused(put(tmp_path, pack(Layout())[:length])).message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = pack(Layout([weight()], sections={"vocab": b"{}"}))
    for length in [*range(0, 700, 7), *range(len(data) - 200, len(data))]:
        refused(put(tmp_path, data[:length]))


FLOOD = 100_000


def with_value(text: bytes) -> bytes:
    """A valid header but for the JSON text of one more key."""
    return json.dumps(HEADER).encode()[:-1] + b', "x": ' + text + b"}"


BOMBS = {
    "not json": b"{",
    "not utf-8": b'{"format": "\xff"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "not an object": b"[1]",
    "null": b"null",
    "two documents": b"{} {}",
    "deep array": with_value(b"[" * FLOOD + b"]" * FLOOD),
    "deep object": with_value(b'{"x":' * FLOOD + b"1" + b"}" * FLOOD),
    "a little too deep": json.dumps({**HEADER, "x": json.loads("[" * 101 + "]" * 101)}).encode(),
    "unclosed": b"[" * FLOOD,
    "huge integer": with_value(b"9" * FLOOD),
    "huge float": with_value(b"1e999"),
    "negative huge float": with_value(b"[-1e999]"),
    "NaN": with_value(b"NaN"),
    "Infinity": with_value(b"Infinity"),
    "-Infinity": with_value(b"[-Infinity]"),
    "duplicate key": with_value(b'1, "version": 2'),
    "nested duplicate key": with_value(b'[{"a": 1, "a": 1}]'),
    "half a surrogate pair": json.dumps({**HEADER, "x": "\ud800"}).encode(),
    "half a surrogate pair as key": json.dumps({**HEADER, "\udc00": 1}).encode(),
    "control character": with_value(b'"\x01"'),
    "no format": json.dumps({"version": 2, "arch": {}}).encode(),
    "format": json.dumps({**HEADER, "format": "gguf"}).encode(),
    "version 3": json.dumps({**HEADER, "version": 3}).encode(),
    "version true": json.dumps({**HEADER, "version": True}).encode(),
    "no arch": json.dumps({"format": "cmf", "version": 2}).encode(),
    "arch is a list": json.dumps({**HEADER, "arch": []}).encode(),
    "provenance is a string": json.dumps({**HEADER, "provenance": "x" * FLOOD}).encode(),
    "tokenizer_config is a number": json.dumps({**HEADER, "tokenizer_config": 1}).encode(),
    "skills is an object": json.dumps({**HEADER, "skills": {}}).encode(),
    "section_hashes is a list": json.dumps({**HEADER, "section_hashes": []}).encode(),
    "section hash is short": json.dumps({**HEADER, "section_hashes": {"vocab": "abc"}}).encode(),
    "section hash is a number": json.dumps({**HEADER, "section_hashes": {"vocab": 1}}).encode(),
    "section hash is not hex": json.dumps({**HEADER, "section_hashes": {"vocab": "0x00000000000000"}}).encode(),
    "shard is a list": json.dumps({**HEADER, "shard": [1, 2]}).encode(),
    "shard without count": json.dumps({**HEADER, "shard": {"no": 1}}).encode(),
    "shard 0": json.dumps({**HEADER, "shard": {"no": 0, "count": 2}}).encode(),
    "shard 3 of 2": json.dumps({**HEADER, "shard": {"no": 3, "count": 2}}).encode(),
    "shard true": json.dumps({**HEADER, "shard": {"no": True, "count": True}}).encode(),
    "shard of very many": json.dumps({**HEADER, "shard": {"no": 1, "count": 10**9}}).encode(),
}


@pytest.mark.parametrize("name", BOMBS)
def test_header_bombs(name: str, tmp_path: Path) -> None:
    started = time.perf_counter()
    error = refused(put(tmp_path, Layout(header=BOMBS[name])))
    assert time.perf_counter() - started < 2
    assert "header" in error.message
    assert error.offset_bytes == 128
    assert len(error.message) < 500
    error.message.encode("utf-8")


def test_unknown_keys_null_and_nesting_are_fine(tmp_path: Path) -> None:
    header = {
        **HEADER,
        "provenance": None,
        "shard": None,
        "skills": None,
        "x": json.loads("[" * 90 + "]" * 90),
        "y": 2**70,
    }
    with open_model(put(tmp_path, Layout(header=header))) as model:
        assert model.header == header
        assert list(model.header) == list(header)


def test_a_hash_of_zero_is_not_recorded(tmp_path: Path) -> None:
    plan = Layout(
        [weight(hash64=0)], header_hash=0, dir_hash=0, header={**HEADER, "section_hashes": {"vocab": "0" * 16}}
    )
    plan.sections = {"vocab": b"tokens"}
    with open_model(put(tmp_path, plan)) as model:
        assert model.decode("w").shape == (4, 8)
        assert model.section("vocab") == b"tokens"


def test_opening_reads_no_payload_and_decoding_checks_it(tmp_path: Path) -> None:
    path = put(tmp_path, Layout([weight(), weight("v")], sections={"vocab": b"{}", "masks": b"mm"}))
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    data[-2] ^= 1
    path.write_bytes(data)
    with open_model(path) as model:
        with pytest.raises(CmfFormatError, match="hash of the payload") as caught:
            model.decode("w")
        assert (caught.value.tensor, caught.value.offset_bytes) == ("w", 4096)
        assert model.decode("w", check_hash=False).shape == (4, 8)
        assert model.decode("v").shape == (4, 8)
        assert model.section("masks") == b"mm"
        with pytest.raises(CmfFormatError, match="hash of the vocab section"):
            model.section("vocab")


def test_payload_errors_name_the_place(tmp_path: Path) -> None:
    overlay = bytes(6) + struct.pack("<IIe", 1, 99, 1)
    path = put(tmp_path, Layout([weight(), Tensor("s", 13, (1, 32), overlay), Tensor("u", 6, (3,), bytes(3))]))
    with open_model(path) as model:
        with pytest.raises(CmfFormatError, match="index outside") as caught:
            model.decode("s")
        assert (caught.value.tensor, caught.value.offset_bytes) == ("s", model.tensors["s"].offset_bytes + 10)
        with pytest.raises(CmfFormatError, match="reserved") as caught:
            model.decode("u")
        assert caught.value.tensor == "u"
        with pytest.raises(KeyError):
            model.decode("nothing")


def test_views_outlive_the_model(tmp_path: Path) -> None:
    path = put(tmp_path, Layout([weight()]))
    model = open_model(path)
    view, weights = model.raw("w"), model.decode("w")
    model.close()
    model.close()
    assert view.tobytes() == bytes(range(128)) == weights.tobytes()
    with pytest.raises(ValueError, match="closed"):
        model.raw("w")
    with open_model(path) as first, open_model(path) as second:
        assert np.array_equal(first.raw("w"), second.raw("w"))
    path.unlink()


def test_a_file_cut_while_it_is_open(tmp_path: Path) -> None:
    path = put(tmp_path, Layout([Tensor("w", 0, (4096,), bytes(16384))]))
    with open_model(path) as model:
        os.truncate(path, 4096 + 1000)
        with pytest.raises(CmfFormatError, match="became shorter") as caught:
            list(model.chunks("w"))
        assert caught.value.offset_bytes == 4096 + 1000


def shard_plans(**overrides: Any) -> dict[str, Layout]:
    names = {no: f"net-0000{no}-of-00002.cmf" for no in (1, 2)}
    first = Layout([weight("a")], {**HEADER, "shard": {"no": 1, "count": 2}, "x": 1}, {"vocab": b"{}", "masks": b"m"})
    second = Layout([weight("b"), weight("c")], {**HEADER, "shard": {"no": 2, "count": 2}}, {"masks": b"other"})
    for key, value in overrides.items():
        setattr(second, key, value)
    return {names[1]: first, names[2]: second}


def put_shards(tmp_path: Path, plans: dict[str, Layout]) -> list[Path]:
    return [put(tmp_path, plan, name) for name, plan in plans.items()]


def test_any_shard_opens_the_model(tmp_path: Path) -> None:
    paths = put_shards(tmp_path, shard_plans())
    for path in paths:
        with open_model(path) as model:
            assert model.path == path
            assert list(model.paths) == paths
            assert list(model.tensors) == ["a", "b", "c"]
            assert [record.path for record in model.tensors.values()] == [paths[0], paths[1], paths[1]]
            assert model.header["x"] == 1
            assert (model.section("vocab"), model.section("masks")) == (b"{}", b"m")
            assert model.bytes_total == sum(p.stat().st_size for p in paths)
            assert model.decode("c").tobytes() == bytes(range(128))


SHARD_FAULTS: dict[str, tuple[Callable[[Path], dict[str, Layout]], str]] = {
    "duplicate": (lambda _: shard_plans(tensors=[weight("a")]), "also in net-00001"),
    "arch": (lambda _: shard_plans(header={**HEADER, "arch": {}, "shard": {"no": 2, "count": 2}}), "arch differs"),
    "no": (lambda _: shard_plans(header={**HEADER, "shard": {"no": 1, "count": 2}}), "expected no 2, count 2"),
    "count": (lambda _: shard_plans(header={**HEADER, "shard": {"no": 2, "count": 3}}), "expected no 2, count 2"),
    "none": (lambda _: shard_plans(header=HEADER), "expected no 2, count 2"),
    "missing": (lambda _: dict(list(shard_plans().items())[:1]), "is missing beside it"),
    "damaged": (lambda _: shard_plans(dir_hash=1), "hash of the dir"),
}


@pytest.mark.parametrize("name", SHARD_FAULTS)
def test_broken_sets_of_shards(name: str, tmp_path: Path) -> None:
    plans, message = SHARD_FAULTS[name]
    paths = put_shards(tmp_path, plans(tmp_path))
    with pytest.raises(CmfFormatError, match=message):
        open_model(paths[0])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    path = put_shards(tmp_path, shard_plans())[0]
    for name in ("net.cmf", "net-00002-of-00003.cmf", "net-00002-of-00002.cmf"):
        path = path.rename(tmp_path / name)
        with pytest.raises(CmfFormatError, match="the file name does not"):
            open_model(path)


def test_a_single_file_may_say_that_it_is_shard_1_of_1(tmp_path: Path) -> None:
    with open_model(put(tmp_path, Layout(header={**HEADER, "shard": {"no": 1, "count": 1}}))) as model:
        assert len(model.paths) == 1


def test_labels() -> None:
    assert DType.Q8_ROW.label == "q8_row"
    assert DType.MIX8_4.label == "mix8_4"
