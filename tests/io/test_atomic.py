"""The old OUT survives whatever happens: full disks, read-only places, interrupts, kills at any moment."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import pytest

from cortiq_fcd.errors import ConfigError, CortiqError, ResourceError
from cortiq_fcd.io import writer
from cortiq_fcd.io.atomic import check_free_space, check_output_path, write_atomically
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.verify import verify_model
from cortiq_fcd.io.writer import create_model, write_model
from tests.io.hand_rolled import HEADER, Layout, Tensor, pack

PARTIAL = re.compile(r"\.out\.cmf\.[0-9a-f]{16}\.partial")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.cmf"
    path.write_bytes(pack(Layout([Tensor(f"w{k}", 0, (64, 1024), bytes([k]) * (1 << 18)) for k in range(8)])))
    return path


def rewrite(source: Path, out: Path, *, force: bool = False) -> None:
    with open_model(source) as model:
        write_model(model, out, header=model.header, replace={}, force=force)


def refusal(kind: type[CortiqError], source: Path, out: Path, *, force: bool = True) -> str:
    """The message of the refusal, which both the early check and the write itself must give."""
    with pytest.raises(kind) as early:
        check_output_path([source], out, force)
    with pytest.raises(kind) as late:
        rewrite(source, out, force=force)
    assert early.value.message == late.value.message
    assert early.value.hint
    return early.value.message


def test_existing_out_needs_force(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    out.write_bytes(b"old")
    assert "exists already" in refusal(ConfigError, source, out, force=False)
    assert out.read_bytes() == b"old"
    rewrite(source, out, force=True)
    rewrite(source, out, force=True)
    assert verify_model(out) == []


def test_out_is_the_input_by_any_link(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    (tmp_path / "hard.cmf").hardlink_to(source)
    (tmp_path / "soft.cmf").symlink_to(source)
    (tmp_path / "far.cmf").symlink_to(tmp_path / "soft.cmf")
    (tmp_path / "sub").mkdir()
    for out in ("in.cmf", "hard.cmf", "soft.cmf", "far.cmf", "sub/../in.cmf"):
        assert "is the same file as" in refusal(ConfigError, source, tmp_path / out)
    assert source.read_bytes() == before


def test_out_is_no_file(source: Path, tmp_path: Path) -> None:
    assert "is a directory" in refusal(ConfigError, source, tmp_path)
    assert "there is no directory" in refusal(ConfigError, source, tmp_path / "none" / "out.cmf")
    assert "there is no directory" in refusal(ConfigError, source, source / "out.cmf")
    assert "not a regular file" in refusal(ConfigError, source, Path(os.devnull))
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "out.cmf")
    assert "there is no directory" in refusal(ConfigError, source, tmp_path / "dangling")


def test_a_link_to_elsewhere_keeps_being_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    real, out = tmp_path / "big-disk" / "real.cmf", tmp_path / "out.cmf"
    real.write_bytes(b"old")
    out.symlink_to(real)
    assert "exists already" in refusal(ConfigError, source, out, force=False)
    rewrite(source, out, force=True)
    assert out.is_symlink()
    assert verify_model(real) == []
    assert [p.name for p in real.parent.iterdir()] == ["real.cmf"]


def test_a_name_too_long_for_its_temporary_file(source: Path, tmp_path: Path) -> None:
    for length in (230, 255, 300, 5000):
        assert "too long" in refusal(ConfigError, source, tmp_path / ("x" * length))
    assert "too long" in refusal(ConfigError, source, tmp_path / ("ü" * 115))
    rewrite(source, tmp_path / ("x" * 229))


def test_sources_that_do_not_exist_yet(tmp_path: Path) -> None:
    """As when a report must be neither the model nor its future output."""
    (tmp_path / "report.json").write_text("{}")
    check_output_path([tmp_path / "none.cmf"], tmp_path / "report.json", force=True)
    with pytest.raises(ConfigError, match="same file"):
        check_output_path([tmp_path / "none.cmf"], tmp_path / "sub" / ".." / "none.cmf", force=True)


def mount(point: Path, *options: str) -> None:
    point.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", point], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"tmpfs can't be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "disk"
    try:
        mount(point, "-o", "size=1m")
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.mark.parametrize("seen_before", [True, False])
def test_full_disk(seen_before: bool, source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the first byte; and if the space goes while writing, nothing is left of the attempt."""
    out = small_disk / "out.cmf"
    out.write_bytes(b"old")
    if not seen_before:
        monkeypatch.setattr(writer, "check_free_space", lambda *_: None)
    with pytest.raises(ResourceError, match=r"are free there|No space left") as caught:
        rewrite(source, out, force=True)
    assert caught.value.exit_code == 6
    assert "space" in caught.value.hint
    assert out.read_bytes() == b"old"
    assert [p.name for p in small_disk.iterdir()] == ["out.cmf"]


def test_disk_full_at_the_last_bytes(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections, the buffered tail and the directory at the start: wherever the disk fills up."""
    monkeypatch.setattr(writer, "check_free_space", lambda *_: None)
    blocks = (1 << 20) // 4096
    filler = small_disk / "filler"
    for free_blocks in range(12):
        filler.write_bytes(bytes((blocks - free_blocks - 1) * 4096))
        tensors = [("w", DType.F32, (8000,), lambda: np.ones(8000, np.float32))]
        try:
            create_model(small_disk / "out.cmf", header=dict(HEADER), tensors=tensors, vocab=bytes(5000), force=True)
        except ResourceError:
            assert [p.name for p in small_disk.iterdir()] == ["filler"]
        else:
            assert verify_model(small_disk / "out.cmf") == []
            assert free_blocks > 3
            return
    raise AssertionError("the file never fitted")


def test_read_only_file_system(source: Path, small_disk: Path) -> None:
    out = small_disk / "out.cmf"
    out.write_bytes(b"old")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "can't be written to" in refusal(ResourceError, source, out)
    assert out.read_bytes() == b"old"


def test_read_only_directory(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "locked"
    place.mkdir()
    place.chmod(0o555)
    try:
        if os.access(place, os.W_OK):
            pytest.skip("permissions do not bind this user")
        assert "can't be written to" in refusal(ResourceError, source, place / "out.cmf")
    finally:
        place.chmod(0o755)


def test_immutable_directory(source: Path, tmp_path: Path) -> None:
    """A place whose refusal shows only when the file is made."""
    place = tmp_path / "frozen"
    place.mkdir()
    try:
        done = subprocess.run(["chattr", "+i", place], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no chattr command")
    if done.returncode:
        pytest.skip("directories can't be made immutable here")
    try:
        with pytest.raises(ResourceError, match="can't be written"):
            rewrite(source, place / "out.cmf")
    finally:
        subprocess.run(["chattr", "-i", place], check=True)
    assert list(place.iterdir()) == []


def test_free_space(tmp_path: Path) -> None:
    check_free_space(tmp_path / "out.cmf", 1000)
    with pytest.raises(ResourceError, match=r"needs 1,000,000,000,000,000,000 bytes, and only"):
        check_free_space(tmp_path / "out.cmf", 10**18)


def failing(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), RuntimeError("bug"), OSError(errno.EIO, "I/O error")]
)
@pytest.mark.parametrize("moment", ["write", "sync", "verify", "rename"])
def test_any_failure_leaves_the_old_file(
    error: BaseException, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.cmf"
    out.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"new" * 100_000)
        if moment == "write":
            raise error

    if moment == "sync":
        monkeypatch.setattr(os, "fsync", failing(error))
    if moment == "rename":
        monkeypatch.setattr(Path, "replace", failing(error))
    with pytest.raises(ResourceError if isinstance(error, OSError) else type(error)):
        write_atomically(out, write, failing(error) if moment == "verify" else lambda _: None)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.cmf"]


def test_an_interrupt_while_a_tensor_is_made(tmp_path: Path) -> None:
    ok = ("a", DType.F32, (4,), lambda: np.zeros(4, np.float32))
    tensors = [ok, ("b", DType.F32, (4,), failing(KeyboardInterrupt()))]
    with pytest.raises(KeyboardInterrupt):
        create_model(tmp_path / "out.cmf", header=dict(HEADER), tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_go_with_the_next_success_unless_their_writer_lives(source: Path, tmp_path: Path) -> None:
    dead = tmp_path / ".out.cmf.0123456789abcdef.partial"
    others = [
        tmp_path / name
        for name in (".out.cmf.bak", ".out.cmf.0123.partial", ".outXcmf.0123456789abcdef.partial", "out.cmf.partial")
    ]
    for path in (dead, *others):
        path.write_bytes(b"half")
    living: list[Path] = []

    def nested(file: BinaryIO) -> None:
        file.write(b"slow writer")
        living.extend(p for p in tmp_path.iterdir() if PARTIAL.fullmatch(p.name) and p != dead)
        rewrite(source, tmp_path / "out.cmf", force=True)  # another writer of the same OUT succeeds meanwhile
        assert living[0].exists()
        assert not dead.exists()

    write_atomically(tmp_path / "out.cmf", nested)
    assert (tmp_path / "out.cmf").read_bytes() == b"slow writer"
    assert all(path.exists() for path in others)
    assert not [p for p in tmp_path.iterdir() if PARTIAL.fullmatch(p.name)]


WRITE_FOREVER = """
    import sys
    from pathlib import Path
    from cortiq_fcd.io.reader import open_model
    from cortiq_fcd.io.writer import write_model
    sources, out = [Path(p) for p in sys.argv[1:3]], Path(sys.argv[3])
    print("ready", flush=True)
    while True:
        for source in sources:
            with open_model(source) as model:
                write_model(model, out, header=model.header, replace={}, force=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL at 20 random moments while two models take turns at OUT: it is always one of them, whole."""
    sources = [tmp_path / "one.cmf", tmp_path / "two.cmf"]
    for path, fill in zip(sources, (b"1", b"2"), strict=True):
        path.write_bytes(pack(Layout([Tensor("w", 0, (1024, 1024), fill * (4 << 20))])))
    whole = [path.read_bytes() for path in sources]
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out.cmf"
    rewrite(sources[0], out)
    versions = [out.read_bytes()]
    rewrite(sources[1], out, force=True)
    versions.append(out.read_bytes())
    rng, in_the_middle = random.Random(0), 0
    for _ in range(20):
        command = [sys.executable, "-c", textwrap.dedent(WRITE_FOREVER), *sources, out]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(rng.random() * 0.1)
            child.send_signal(signal.SIGKILL)
        assert out.read_bytes() in versions
        left = [p for p in place.iterdir() if p != out]
        assert all(PARTIAL.fullmatch(p.name) for p in left)
        in_the_middle += bool(left)
    assert in_the_middle > 0
    assert [path.read_bytes() for path in sources] == whole
    rewrite(sources[0], out, force=True)
    assert [p.name for p in place.iterdir()] == ["out.cmf"]
    assert out.read_bytes() == versions[0]


def test_a_source_that_cant_be_looked_at_is_not_the_targets_fault(tmp_path: Path) -> None:
    check_output_path([tmp_path / ("x" * 500)], tmp_path / "out.cmf", False)
