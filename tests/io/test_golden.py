"""Files of another implementation: every dtype bit for bit, every hash, and rewriting without loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.io.writer import expected_bytes, write_model
from tests.io.golden import FILES, GOLDEN, needs_golden, recorded_hashes
from tests.oracles import cmf_reader

pytestmark = needs_golden
HASHES = recorded_hashes()
DTYPE_FILES = [path for path in FILES if path.parent.name == "dtypes"]
EXPECTED_NOTES = {
    "tiny-qwen3-skill-appended.cmf": ["lies inside the span of the data section", "are not all zero"],
    "tiny-qwen3-standalone-skill.cmf": ["the header has a hash for it, but it is absent"],
}


def test_all_dtypes_are_there() -> None:
    assert not GOLDEN.is_dir() or len(DTYPE_FILES) == 14


@pytest.mark.parametrize("path", DTYPE_FILES, ids=lambda p: p.stem)
def test_decodes_bit_for_bit(path: Path) -> None:
    with open_model(path) as model, np.load(path.with_suffix(".npz")) as expected:
        assert set(model.tensors) == set(expected.files)
        for name in model.tensors:
            got, want = model.decode(name), expected[name]
            assert got.dtype == want.dtype == np.float32
            assert got.shape == want.shape
            differs = (got.view(np.uint32) != want.view(np.uint32)) & ~((got == 0) & (want == 0))
            assert not differs.any(), f"{name}: {differs.sum()} of {differs.size}"


@pytest.mark.parametrize("name", HASHES)
def test_directories_and_hashes(name: str) -> None:
    with open_model(GOLDEN / name) as model:
        assert model.dir_hash == HASHES[name]["dir_hash"]
        got = {
            tensor: [record.dtype.label, list(record.shape), record.nbytes, f"{record.hash64:016x}"]
            for tensor, record in model.tensors.items()
        }
        assert list(got.items()) == list(HASHES[name]["tensors"].items())
        for tensor in model.tensors:
            model.decode(tensor)  # checks the hash


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_verify_finds_no_fault(path: Path) -> None:
    findings = verify_model(path)
    assert [f.kind for f in findings] == ["note"] * len(EXPECTED_NOTES.get(path.name, []))
    for finding, text in zip(findings, EXPECTED_NOTES.get(path.name, []), strict=True):
        assert finding.message.endswith(text)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_rewriting_keeps_everything(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    with open_model(path) as model:
        size = expected_bytes(model, header=model.header, replace={})
        written = write_model(model, out, header=model.header, replace={})
        assert written.bytes == size == out.stat().st_size
        assert (written.tensors_copied, written.tensors_written) == (len(model.tensors), 0)
        assert verify_model(out) == []
        with open_model(out) as again:
            assert list(again.tensors) == list(model.tensors)
            for name, record in model.tensors.items():
                assert (again.tensors[name].dtype, again.tensors[name].shape) == (record.dtype, record.shape)
                assert np.array_equal(again.raw(name), model.raw(name))
            expected = {key: value for key, value in model.header.items() if key != "shard"}
            if path.name == "tiny-qwen3-standalone-skill.cmf":
                expected["section_hashes"] = {}  # its only entry is for a section that is not there
            assert again.header == expected
            assert list(again.header) == list(expected)
            assert again.required_features == model.required_features
            for section in ("masks", "vocab", "index"):
                assert again.section(section) == model.section(section)
            assert again.dir_hash == written.dir_hash
    cmf_reader.read(out)


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name in ("dtypes", "models")], ids=lambda p: p.name)
def test_an_unchanged_model_is_rewritten_byte_for_byte(path: Path, tmp_path: Path) -> None:
    """True for files of the written order, whose header has the compact form that both programs write."""
    with open_model(path) as model:
        write_model(model, tmp_path / "out.cmf", header=model.header, replace={})
    assert (tmp_path / "out.cmf").read_bytes() == path.read_bytes()


def test_a_merged_model_equals_the_one_that_was_cut(tmp_path: Path) -> None:
    shards = [GOLDEN / f"polished/tiny-qwen3-sharded-0000{no}-of-00003.cmf" for no in (1, 2, 3)]
    out = tmp_path / "merged.cmf"
    with open_model(shards[2]) as model, open_model(GOLDEN / "models/tiny-qwen3.cmf") as whole:
        assert model.path == shards[2]
        assert list(model.paths) == shards
        write_model(model, out, header=model.header, replace={})
        with open_model(out) as merged:
            assert merged.paths == (out,)
            assert "shard" not in merged.header
            assert set(merged.tensors) == set(whole.tensors)
            assert all(np.array_equal(merged.decode(name), whole.decode(name)) for name in whole.tensors)
            assert merged.section("vocab") == whole.section("vocab")


def test_unknown_keys_and_masks_survive_a_polish(tmp_path: Path) -> None:
    from cortiq_fcd.io.layout import DType

    out = tmp_path / "out.cmf"
    with open_model(GOLDEN / "polished/tiny-llama-masks.cmf") as model:
        name = "model.layers.1.mlp.up_proj.weight"
        header = {**model.header, "provenance": {**model.header["provenance"], "fcd": {"steps": 3}}}
        write_model(model, out, header=header, replace={name: (DType.Q8_2F, model.decode(name))})
        with open_model(out) as again:
            assert again.header["arch"]["x_future_arch_key"] == {"nested": [1, 2, {"deep": None}]}
            assert again.header["provenance"]["x_note"] == {"unicode": "ключ — 鍵"}
            assert again.header["tokenizer_config"]["x_future_tok"] == "kept"
            assert again.header["x_future_top"] == [1, "two", {"three": 3.5}]
            assert again.header["section_hashes"] == model.header["section_hashes"]
            assert again.required_features == 0b111
            assert again.section("masks") == model.section("masks")
            assert again.section("index") == model.section("index")
    _, tensors, _ = cmf_reader.read(out)
    assert np.abs(tensors[name]).max() > 0
