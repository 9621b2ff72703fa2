"""Mutated files: each opens and can be read to the end, or is refused with our error, soon and in little memory.

1,500 files in a normal run. The campaign: `CMF_FUZZ_FILES=20000 python -m pytest tests/io/test_fuzz.py` (minutes).
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from cortiq_fcd.errors import CmfFormatError
from cortiq_fcd.io.reader import CmfModel, open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.io.writer import write_model
from tests.io.mutations import SEEDS, mutated

FILES = int(os.environ.get("CMF_FUZZ_FILES", "1500"))
BATCHES = 10
MOST_SECONDS = 2.0
MOST_BYTES_PER_FILE_BYTE = 40  # a q1 tile of 6 bytes is 128 bytes of weights; twice that while it is decoded
SPARE_BYTES = 300_000  # of parsing, whatever the file


def read_everything(path: Path) -> str:
    """Open, decode, verify, and sometimes rewrite; "ok" or what the refusal said, checked for its parts."""
    outcome = "ok"
    try:
        with open_model(path) as model:
            for name, record in model.tensors.items():
                assert model.raw(name).size == record.nbytes
                for check_hash in (False, True):
                    outcome = attempt_decode(model, name, check_hash) or outcome
            for section in ("masks", "vocab", "index"):
                try:
                    model.section(section)
                except CmfFormatError as error:
                    check(error, path)
    except CmfFormatError as error:
        check(error, path)
        outcome = error.what[:24]
        assert [finding.kind for finding in verify_model(path)] == ["fault"]
    else:
        verify_model(path)
    return outcome


def attempt_decode(model: CmfModel, name: str, check_hash: bool) -> str:
    try:
        assert model.decode(name, check_hash=check_hash).shape == model.tensors[name].shape
    except CmfFormatError as error:
        check(error, model.path, name)
        return error.what[:24]
    return ""


def check(error: CmfFormatError, path: Path, tensor: str | None = None) -> None:
    assert error.path == str(path)
    assert tensor is None or error.tensor == tensor
    assert "shard" in error.message or error.offset_bytes is not None
    assert error.offset_bytes is None or 0 <= error.offset_bytes < 2**64
    assert len(error.message) < 1000
    error.message.encode("utf-8")


def measured(path: Path, case: int) -> str:
    """`read_everything` with its time checked, and for one case in ten (it is slow) the memory it took at most."""
    measure_memory = case % 10 == 0
    if measure_memory:
        tracemalloc.start()
    started = time.perf_counter()
    try:
        outcome = read_everything(path)
        if measure_memory:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            assert peak_bytes <= MOST_BYTES_PER_FILE_BYTE * path.stat().st_size + SPARE_BYTES
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < MOST_SECONDS
    return outcome


def rewrite(path: Path, out: Path) -> None:
    """What opens can be rewritten, or is refused, and what was written has no fault."""
    try:
        with open_model(path) as model:
            write_model(model, out, header=model.header, replace={}, force=True)
    except CmfFormatError:
        return
    assert not [finding for finding in verify_model(out) if finding.kind == "fault"]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_files(batch: int, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    cases = range(batch, FILES, BATCHES)
    for case in cases:
        path = tmp_path / "fuzzed.cmf"
        path.write_bytes(mutated(case))
        try:
            outcomes[measured(path, case)] += 1
            if case % 7 == 0:
                rewrite(path, tmp_path / "out.cmf")
        except BaseException as error:
            error.args = (f"case {case}: mutated({case}) finds: {error}", *error.args[1:])
            raise
    assert len(outcomes) > 10, outcomes  # the mutations reach many rules ..
    assert 0.05 < outcomes["ok"] / len(cases) < 0.9, outcomes  # .. and do not break everything


def test_the_seeds_themselves(tmp_path: Path) -> None:
    for seed in SEEDS:
        path = tmp_path / "seed.cmf"
        path.write_bytes(seed)
        assert read_everything(path) == ("ok" if b"t.u8" not in seed else "u8 [5]: this dtype is re")
        assert all(finding.kind == "note" for finding in verify_model(path))
