"""Writing: what is kept, what is recomputed, and that the result is what an independent reader reads."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.errors import CmfFormatError, ConfigError, NonFiniteWeightsError, ResourceError
from cortiq_fcd.io.codecs import CODECS
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.io.writer import create_model, expected_bytes, write_model
from tests.io.hand_rolled import HEADER, IDS, Layout, Tensor, pack, payload_of, small_model
from tests.io.test_reader import put, put_shards, shard_plans
from tests.oracles import cmf_reader

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.standard_normal((6, 64)) * 0.1).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return put(tmp_path, small_model(np.random.default_rng(0)), "source.cmf")


def test_everything_is_kept_and_the_rest_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    new = np.ascontiguousarray(WEIGHTS[:3])
    with open_model(source) as model:
        replace: dict[str, tuple[DType, np.ndarray]] = {
            "t.f16.weight": (DType.Q8_2F, new),
            "t.q1.weight": (DType.F32, new),
        }
        size = expected_bytes(model, header=model.header, replace={n: d for n, (d, _) in replace.items()})
        written = write_model(model, out, header=model.header, replace=replace)
        assert (written.path, written.bytes, written.bytes) == (out, size, out.stat().st_size)
        assert (written.tensors_copied, written.tensors_written) == (len(model.tensors) - 2, 2)
        with open_model(out) as again:
            assert json.dumps(again.header) == json.dumps(model.header)
            assert again.dir_hash == written.dir_hash
            assert list(again.tensors) == list(model.tensors)
            assert again.tensors["t.f16.weight"].dtype == DType.Q8_2F
            for name in model.tensors:
                if name not in replace:
                    assert again.raw(name).tobytes() == model.raw(name).tobytes()
    header, tensors, sections = cmf_reader.read(out)
    assert header["arch"] == model.header["arch"]
    assert np.array_equal(tensors["t.q1.weight"], new)
    assert np.abs(tensors["t.f16.weight"] - new).max() < 0.003
    assert sections == small_model(np.random.default_rng(0)).sections
    assert [f.kind for f in verify_model(out)] == ["note"]  # the u8 tensor


@pytest.mark.parametrize("dtype", [dtype.label for dtype, codec in CODECS.items() if codec.encode])
def test_size_is_told_before(dtype: str, source: Path, tmp_path: Path) -> None:
    with open_model(source) as model:
        new = {"t.f32.weight": (DType(IDS[dtype]), WEIGHTS[:3])}
        told = expected_bytes(model, header=model.header, replace={"t.f32.weight": DType(IDS[dtype])})
        written = write_model(model, tmp_path / "out.cmf", header=model.header, replace=new)
    if dtype == "vbit_ro":
        assert written.bytes <= told
    else:
        assert written.bytes == told


@pytest.mark.parametrize(
    ("replaced", "features"),
    [({}, 0b111), ({"t.vbit.weight"}, 0b111), ({"t.vbit.weight", "t.q8_2f.weight"}, 0b011)],
)
def test_feature_bit_2_follows_the_dtypes(replaced: set[str], features: int, source: Path, tmp_path: Path) -> None:
    with open_model(source) as model:
        new = dict.fromkeys(replaced, (DType.VBIT_RO, WEIGHTS[:3]))
        write_model(model, tmp_path / "out.cmf", header=model.header, replace=new)
    with open_model(tmp_path / "out.cmf") as again:
        assert again.required_features == features


def test_other_feature_bits_are_the_sources(tmp_path: Path) -> None:
    plan = Layout([Tensor("w", 0, (4,), bytes(16))], features=0b1100111)
    with open_model(put(tmp_path, plan)) as model:
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={})
    with open_model(tmp_path / "out.cmf") as again:
        assert again.required_features == 0b1100011


def test_shards_become_one_file(tmp_path: Path) -> None:
    plans = shard_plans()
    paths = put_shards(tmp_path, plans)
    out = tmp_path / "merged-00001-of-00002.cmf"  # even under a name that looks like a shard's
    with open_model(paths[1]) as model:
        write_model(model, out, header=model.header, replace={})
    with open_model(out) as again:
        assert list(again.tensors) == ["a", "b", "c"]
        assert again.paths == (out,)
        assert "shard" not in again.header
        assert again.header["x"] == 1
        assert (again.section("vocab"), again.section("masks"), again.section("index")) == (b"{}", b"m", None)
    assert verify_model(out) == []


def test_section_hashes_follow_the_sections(tmp_path: Path) -> None:
    old = {"x_other": "kept", "index": "0123456789abcdef", "masks": None}
    plan = Layout(sections={"vocab": b"tokens"}, header={**HEADER, "section_hashes": old, "z": 1})
    with open_model(put(tmp_path, plan)) as model:
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={})
    with open_model(tmp_path / "out.cmf") as again:
        hashes = {"x_other": "kept", "vocab": f"{cmf_reader.hash64(b'tokens'):016x}"}
        assert again.header["section_hashes"] == hashes
        assert list(again.header) == [*HEADER, "section_hashes", "z"]
    assert verify_model(tmp_path / "out.cmf") == []


def test_unrecorded_hashes_are_recorded(tmp_path: Path) -> None:
    plan = Layout([Tensor("w", 0, (4,), b"0123456789abcdef", hash64=0)], header_hash=0, dir_hash=0)
    with open_model(put(tmp_path, plan)) as model:
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={})
    assert verify_model(tmp_path / "out.cmf") == []


def damage(path: Path, what: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(what)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("part", ["tensor", "section"])
def test_a_damaged_source_is_not_copied(part: str, source: Path, tmp_path: Path) -> None:
    plan = small_model(np.random.default_rng(0))
    damage(source, plan.tensors[3].payload if part == "tensor" else plan.sections["index"])
    out = tmp_path / "out.cmf"
    out.write_bytes(b"old")
    with open_model(source) as model, pytest.raises(CmfFormatError, match="hash of the") as caught:
        write_model(model, out, header=model.header, replace={}, force=True)
    assert caught.value.path == str(source)
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.cmf", "source.cmf"]


def test_a_damaged_tensor_that_is_replaced_does_not_matter(source: Path, tmp_path: Path) -> None:
    damage(source, small_model(np.random.default_rng(0)).tensors[3].payload)
    with open_model(source) as model:
        name = list(model.tensors)[3]
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={name: (DType.F32, WEIGHTS[:3])})


BAD_WEIGHTS: list[tuple[DType, float, type[Exception], str]] = [
    (DType.F32, np.nan, NonFiniteWeightsError, "nan at flat index 5"),
    (DType.BF16, np.inf, NonFiniteWeightsError, "inf at flat index 5"),
    (DType.Q8_ROW, -np.inf, NonFiniteWeightsError, "-inf at flat index 5"),
    (DType.F16, 1e5, ConfigError, "does not fit f16"),
]


@pytest.mark.parametrize(("dtype", "value", "kind", "message"), BAD_WEIGHTS)
def test_weights_that_cannot_be_stored(
    dtype: DType, value: float, kind: type[Exception], message: str, source: Path, tmp_path: Path
) -> None:
    new = WEIGHTS[:3].copy()
    new[0, 5] = value
    with open_model(source) as model, pytest.raises(kind, match=message) as caught:
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={"t.f32.weight": (dtype, new)})
    assert "t.f32.weight" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.cmf"]


def test_a_shape_the_dtype_cannot_hold(source: Path, tmp_path: Path) -> None:
    replace: dict[str, tuple[DType, np.ndarray]] = {"t.norm.weight": (DType.Q8_ROW, np.zeros(32, np.float32))}
    with open_model(source) as model, pytest.raises(ConfigError, match="can't be q8_row"):
        write_model(model, tmp_path / "out.cmf", header=model.header, replace=replace)


def test_bugs_of_the_caller(source: Path, tmp_path: Path) -> None:
    def write(**changes: Any) -> None:
        arguments = {"header": model.header, "replace": {}, **changes}
        write_model(model, tmp_path / "out.cmf", **arguments)

    with open_model(source) as model:
        with pytest.raises(ValueError, match="not in the source"):
            write(replace={"nothing": (DType.F32, WEIGHTS)})
        with pytest.raises(ValueError, match="can't encode"):
            write(replace={"t.f32.weight": (DType.F32, WEIGHTS)})
        with pytest.raises(ValueError, match="can't encode"):
            write(replace={"t.f32.weight": (DType.Q1, WEIGHTS[:3])})
        with pytest.raises(ValueError, match="bytes are no"):
            write(replace={"t.f32.weight": (DType.F16, np.zeros(5, np.uint8))})
        with pytest.raises(ValueError, match="JSON compliant"):
            write(header={**model.header, "provenance": {"ppl": float("nan")}})
        with pytest.raises(CmfFormatError, match="arch is missing"):
            write(header={"format": "cmf", "version": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.cmf"]


def test_create_from_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new.cmf"
    alive: list[str] = []

    def make(name: str, array: np.ndarray) -> Any:
        def produce() -> np.ndarray:
            alive.append(name)
            return array

        return produce

    large = np.arange(8192, dtype=np.float32).reshape(2, 4096)
    overlay = np.frombuffer(payload_of("q1t", (3, 64), RNG), np.uint8)
    tensors = [
        ("a", DType.F16, (6, 64), make("a", WEIGHTS)),
        ("empty", DType.F32, (0, 5), make("empty", np.zeros((0, 5), np.float32))),
        ("b", DType.F32, (2, 4096), make("b", large)),
        ("c", DType.Q1T, (3, 64), make("c", overlay)),
        ("d", DType.VBIT_RO, (6, 64), make("d", WEIGHTS.astype(np.float64))),
        ("last", DType.F32, (0,), make("last", np.zeros(0, np.float32))),
    ]
    written = create_model(out, header=dict(HEADER), tensors=iter(tensors), vocab=b"{}", masks=b"m")
    assert alive == ["a", "empty", "b", "c", "d", "last"]
    assert (written.tensors_copied, written.tensors_written, written.bytes) == (0, 6, out.stat().st_size)
    assert verify_model(out) == []
    with open_model(out) as model:
        assert model.required_features == 0b11
        offsets = [record.offset_bytes for record in model.tensors.values()]
        assert offsets[2] % 4096 == 0  # 32 KiB
        assert all(offset % 64 == 0 for offset in offsets)
        assert np.array_equal(model.decode("b"), large)
        assert model.raw("c").tobytes() == overlay.tobytes()
        assert model.section("masks") == b"m"
    _, tensors_read, _ = cmf_reader.read(out)
    assert np.abs(tensors_read["a"] - WEIGHTS).max() < 2e-4


def test_create_without_tensors(tmp_path: Path) -> None:
    for sections in ({}, {"vocab": b"tokens"}):
        create_model(tmp_path / "new.cmf", header=dict(HEADER), tensors=[], force=True, **sections)
        assert verify_model(tmp_path / "new.cmf") == []


def test_create_refuses_two_tensors_of_a_name(tmp_path: Path) -> None:
    one = ("a", DType.F32, (1,), lambda: np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="same name"):
        create_model(tmp_path / "new.cmf", header=dict(HEADER), tensors=[one, one])


def test_two_writes_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "one.cmf", tmp_path / "two.cmf"]
    for out in outs:
        with open_model(source) as model:
            replace = {"t.f32.weight": (DType.Q8_2F, WEIGHTS[:3]), "t.bf16.weight": (DType.VBIT_RO, WEIGHTS[:3])}
            write_model(model, out, header=model.header, replace=replace)
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_permissions_are_those_of_any_new_file(source: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with open_model(source) as model:
            write_model(model, tmp_path / "out.cmf", header=model.header, replace={})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out.cmf").stat().st_mode) == 0o640


def test_what_was_written_is_read_back(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that changes bytes behind our back: the old file stays."""
    real = os.fsync

    def rot(handle: int) -> None:
        real(handle)
        os.pwrite(handle, b"\xff\xff", 4096)

    out = tmp_path / "out.cmf"
    out.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", rot)
    with open_model(source) as model, pytest.raises(ResourceError, match="not what was written"):
        write_model(model, out, header=model.header, replace={}, force=True)
    assert out.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


STREAM = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from cortiq_fcd.io.layout import DType
    from cortiq_fcd.io.reader import open_model
    from cortiq_fcd.io.verify import verify_model
    from cortiq_fcd.io.writer import create_model, write_model
    out = Path(sys.argv[1])
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shape = (1024, 8192)  # 32 MiB each
    make = lambda: np.ones(shape, np.float32)
    names = [f"t{k}" for k in range(12)]
    header = {"format": "cmf", "version": 2, "arch": {}}
    create_model(out / "in.cmf", header=header, tensors=[(n, DType.F32, shape, make) for n in names])
    created = peak()
    with open_model(out / "in.cmf") as model:
        write_model(model, out / "out.cmf", header=model.header, replace={"t3": (DType.F16, make())})
        verify_model(out / "in.cmf")
        for name in names:
            model.decode(name)
    print(created, peak())
"""


def test_a_model_much_larger_than_the_memory_used(tmp_path: Path) -> None:
    """384 MiB pass through create, rewrite, verify and decode; a tensor of 32 MiB, its encoding, a buffer are held."""
    script = textwrap.dedent(STREAM)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    created_kib, all_kib = map(int, done.stdout.split())
    start = subprocess.run(
        [sys.executable, "-c", "import resource, cortiq_fcd.io.writer; print(resource.getrusage(0).ru_maxrss)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(created_kib, all_kib) - int(start.stdout) < 150 * 1024


def test_reading_files_starts_without_torch() -> None:
    code = "import sys, cortiq_fcd.io.writer, cortiq_fcd.io.verify; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pack_and_writer_agree(tmp_path: Path) -> None:
    """Two independent descriptions of the bytes: the builder of these tests, and the writer (small tensors only)."""
    header = {"format": "cmf", "version": 2, "arch": {"a": 1}}
    plan = Layout([Tensor("w", 0, (4,), bytes(range(16))), Tensor("v", 1, (3,), bytes(6))], sections={"vocab": b"t"})
    plan.header = json.dumps(
        {**header, "section_hashes": {"vocab": f"{cmf_reader.hash64(b't'):016x}"}}, separators=(",", ":")
    ).encode()
    tensors = [
        ("w", DType.F32, (4,), lambda: np.frombuffer(bytes(range(16)), np.float32)),
        ("v", DType.F16, (3,), lambda: np.zeros(3, np.float32)),
    ]
    create_model(tmp_path / "new.cmf", header=header, tensors=tensors, vocab=b"t")
    assert (tmp_path / "new.cmf").read_bytes() == pack(plan)
