"""What verify calls a fault, what a note, and what it must not miss."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from cortiq_fcd.errors import ConfigError
from cortiq_fcd.io.verify import Finding, verify_model
from tests.io.hand_rolled import HEADER, Layout, Tensor, pack, small_model
from tests.io.test_reader import put_shards, shard_plans


def weight(name: str, **overrides: object) -> Tensor:
    return Tensor(name, 0, (16,), bytes(range(64)), **overrides)  # type: ignore[arg-type]


def verify(tmp_path: Path, plan: Layout | bytes) -> list[Finding]:
    path = tmp_path / "model.cmf"
    path.write_bytes(plan if isinstance(plan, bytes) else pack(plan))
    findings = verify_model(path)
    assert all(finding.where.startswith(str(path)) for finding in findings)
    return findings


def one(findings: list[Finding], kind: str, message: str, where: str = "") -> None:
    assert [finding.kind for finding in findings] == [kind], findings
    assert message in findings[0].message
    assert where in findings[0].where


def test_a_perfect_file(tmp_path: Path) -> None:
    plan = small_model(np.random.default_rng(0))
    plan.tensors = [t for t in plan.tensors if t.name != "t.u8"]
    assert verify(tmp_path, plan) == []


def test_a_reserved_dtype_is_noted_and_its_hash_checked(tmp_path: Path) -> None:
    plan = Layout([Tensor("u", 6, (5,), b"hello")])
    one(verify(tmp_path, plan), "note", "reserved", "tensor 'u'")
    data = pack(plan)
    one(verify(tmp_path, data[:-1] + b"!")[:1], "fault", "hash", "tensor 'u'")


@pytest.mark.parametrize("name", [t.name for t in small_model(np.random.default_rng(0)).tensors])
def test_one_flipped_bit_in_any_payload(name: str, tmp_path: Path) -> None:
    plan = small_model(np.random.default_rng(0))
    data = bytearray(pack(plan))
    payload = next(t.payload for t in plan.tensors if t.name == name)
    data[data.index(payload) + len(payload) // 2] ^= 0x10
    faults = [finding for finding in verify(tmp_path, bytes(data)) if finding.kind == "fault"]
    assert faults
    assert "hash" in faults[0].message or "width" in faults[0].message
    assert name in faults[0].where + faults[0].message


@pytest.mark.parametrize("section", ["masks", "vocab", "index"])
def test_one_flipped_bit_in_any_section(section: str, tmp_path: Path) -> None:
    plan = small_model(np.random.default_rng(0))
    data = bytearray(pack(plan))
    data[data.index(plan.sections[section])] ^= 1
    faults = [finding for finding in verify(tmp_path, bytes(data)) if finding.kind == "fault"]
    one(faults, "fault", "hash", f"{section} section")


def test_zeroed_hashes_are_told(tmp_path: Path) -> None:
    plan = Layout([weight("w", hash64=0)], sections={"vocab": b"{}", "masks": b"m"}, header_hash=0, dir_hash=0)
    plan.header = {**HEADER, "section_hashes": {"vocab": "0" * 16}}
    findings = verify(tmp_path, plan)
    assert {f.kind for f in findings} == {"note"}
    assert all("not recorded" in f.message for f in findings)
    parts = [f.where.rsplit(": ", 1)[1] for f in findings]
    assert parts == ["header section", "dir section", "masks section", "vocab section", "tensor 'w'"]


def test_an_empty_tensor_needs_no_hash(tmp_path: Path) -> None:
    assert verify(tmp_path, Layout([Tensor("e", 0, (0, 4), b"")])) == []


def test_hash_without_section(tmp_path: Path) -> None:
    plan = Layout(header={**HEADER, "section_hashes": {"index": "0123456789abcdef", "masks": None}})
    one(verify(tmp_path, plan), "note", "absent", "index section")


def test_trailing_bytes(tmp_path: Path) -> None:
    for trailing in (b"\0", b"x" * 5000):
        one(verify(tmp_path, Layout([weight("w")], trailing=trailing)), "fault", f"{len(trailing)} bytes past the last")


def test_overlapping_tensors(tmp_path: Path) -> None:
    big = Tensor("big", 0, (64,), bytes(range(256)))
    inside = weight("in", off=64)
    inside.payload = big.payload[64:128]
    far = weight("far", off=192)
    far.payload = big.payload[192:256]
    findings = verify(tmp_path, Layout([big, inside, far]))
    assert [f.kind for f in findings] == ["fault", "fault"]
    assert "64 bytes with tensor 'big'" in findings[0].message
    assert "tensor 'far'" in findings[1].where  # seen although 'in' ends between them


def test_a_tensor_over_a_section(tmp_path: Path) -> None:
    plan = Layout([weight("w"), weight("v")], sections={}, header={**HEADER})
    data = pack(plan)
    vocab_at = 4096 + 64
    plan.spans = {"vocab": (vocab_at, 64)}
    findings = verify(tmp_path, pack(plan))
    assert len(data) == len(pack(plan))
    faults = [f for f in findings if f.kind == "fault"]
    one(faults, "fault", "with the vocab section", "tensor 'v'")
    assert any("inside the span of the data section" in f.message for f in findings if f.kind == "note")


def test_sections_that_share_bytes(tmp_path: Path) -> None:
    plan = Layout(sections={"masks": bytes(100), "vocab": bytes(100)}, header={**HEADER, "section_hashes": {}})
    end = len(pack(plan))
    plan.spans = {"masks": (end - 200, 150)}
    faults = [f for f in verify(tmp_path, plan) if f.kind == "fault"]
    one(faults, "fault", "shares 50 bytes with the masks section", "vocab section")
    plan.spans = {"masks": (end - 100, 50)}
    notes = [f for f in verify(tmp_path, plan) if "inside the span" in f.message]
    one(notes, "note", "lies inside the span of the vocab section", "masks section")


def test_content_in_gaps(tmp_path: Path) -> None:
    data = bytearray(pack(Layout([weight("w"), Tensor("v", 0, (1,), bytes(4)), weight("u")])))
    data[4096 + 64 + 4] = 1
    one(verify(tmp_path, bytes(data)), "note", "60 bytes between the parts are not all zero", f"byte {4096 + 68}")
    data[3000] = 7
    assert [f.kind for f in verify(tmp_path, bytes(data))] == ["note", "note"]


def test_indices_inside_payloads_are_faults_even_with_a_right_hash(tmp_path: Path) -> None:
    overlay = bytes(6) + struct.pack("<IIe", 1, 99, 1)
    pointers = bytes(27) + struct.pack("<4I", 0, 2, 1, 2) + bytes(8)
    offsets = bytes([3, 0, 0]) + struct.pack("<II", 0, 11) + bytes(12)
    plan = Layout(
        [Tensor("s", 13, (1, 32), overlay), Tensor("t", 14, (3, 32), pointers), Tensor("o", 10, (1, 32), offsets)]
    )
    findings = verify(tmp_path, plan)
    assert [f.kind for f in findings] == ["fault"] * 3
    texts = [
        "index outside the tensor: expected below 32, got 99",
        "row pointer below",
        "offset of row 1: expected 12, got 11",
    ]
    for finding, text, name in zip(findings, texts, "sto", strict=True):
        assert text in finding.message
        assert f"tensor '{name}' at byte" in finding.message


def test_a_file_that_does_not_open_is_one_fault(tmp_path: Path) -> None:
    one(verify(tmp_path, b"CMF\x01"), "fault", "the file ends inside the envelope")
    one(verify(tmp_path, pack(Layout(dir_hash=5))), "fault", "hash of the dir section")
    with pytest.raises(ConfigError):
        verify_model(tmp_path / "none.cmf")


def test_every_shard_is_verified(tmp_path: Path) -> None:
    paths = put_shards(tmp_path, shard_plans())
    assert verify_model(paths[0]) == []
    data = bytearray(paths[1].read_bytes())
    data[4096] ^= 1
    paths[1].write_bytes(data)
    faults = [f for f in verify_model(paths[0]) if f.kind == "fault"]
    assert len(faults) == 1
    assert faults[0].where == f"{paths[1]}: tensor 'b'"
