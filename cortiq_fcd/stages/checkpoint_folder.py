"""The folder OUT.partial: what it is called, which files in it are this program's, and the lock of a run at work.

    OUT.partial/checkpoint-000007.safetensors    masters, both moments, the best state: flat f32 vectors
    OUT.partial/checkpoint-000007.json           everything else, and both hashes; written last: the mark of a whole one
    OUT.partial/best-000025.safetensors          the best state of step 25, while a run short of memory is at work
    OUT.partial/moments.safetensors              moments of the optimizer, while a run very short of memory is at work
    OUT.partial/lock                             held while a run is at work
    OUT.partial/out.json                         the record of the OUT that is being written

Other files in it are somebody else's, and stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from cortiq_fcd.errors import ConfigError, ResourceError
from cortiq_fcd.io.paths import is_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, ANNOUNCEMENT, MOMENTS = "lock", "out.json", "moments.safetensors"
BEST = "best-*.safetensors"
_NAME = re.compile(r"checkpoint-(\d{6,})\.json")
_TENSORS_NAME = r"((checkpoint|best)-\d{6,}|moments)\.safetensors"
_TEMPORARY = re.compile(rf"\.({_TENSORS_NAME}|checkpoint-\d{{6,}}\.json|out\.json)\.[0-9a-f]{{16}}\.partial")
_CHECKPOINT_BEGINS, _OUT_BEGINS = b'{"hash64":', b'{"identity":'
_MOST_TENSORS_HEADER = 1 << 12  # bytes; those of ours name four tensors


def folder_of(out: Path) -> Path:
    """Where the checkpoints of a polish into `out` lie."""
    return out.with_name(out.name + ".partial")


def finished(folder: Path) -> Path:
    """What the folder is called for the moment in which it is removed."""
    return folder.with_name(f".{folder.name}.finished")


def check_folder(out: Path) -> None:
    """ConfigError if something that is not this program's stands where checkpoints into `out` would go."""
    folder = folder_of(out)
    hint = "move it away, or name another OUT"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder}: is no directory, and checkpoints go into one of this name", hint=hint)
    for path in (folder / LOCK, folder / ANNOUNCEMENT):
        if os.path.lexists(path) and not is_ours(path):
            raise ConfigError(f"{path}: is not this program's, and checkpoints need the name", hint=hint)


@contextlib.contextmanager
def at_work(folder: Path, *, may_go: Callable[[], bool]) -> Iterator[None]:
    """Make the folder and hold its lock inside the block; an empty folder goes at the end, if it `may_go`.

    ConfigError if another run is at work there, ResourceError if it can't be made.
    """
    try:
        folder.mkdir(exist_ok=True)
        lock = _open_lock(folder / LOCK)
    except OSError as error:
        raise ResourceError(f"{folder}: can't be written ({error.strerror})") from error
    with lock:
        if not _locked(lock):
            raise ConfigError(f"{folder}: another run is at work there", hint="name another OUT")
        remove(finished(folder))
        try:
            yield
        finally:
            for path in (*folder.glob(BEST), folder / MOMENTS):  # checkpoints hold copies
                unlink_ours(path)
            if may_go() and [path.name for path in folder.glob("*")] == [LOCK]:
                remove(folder)


def free_name(folder: Path) -> Path:
    """The next JSON file, with no other's tensors under its number."""
    number = next((_number(path) for path in newest_first(folder)), 0) + 1
    while True:
        path = folder / f"checkpoint-{number:06d}.json"
        tensors = path.with_suffix(".safetensors")
        if not os.path.lexists(path) and (not os.path.lexists(tensors) or is_ours(tensors)):
            return path
        number += 1


def _open_lock(path: Path) -> BinaryIO:
    """Never emptied, never through a link, and without waiting at a pipe: the name may be somebody else's."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "rb", buffering=0)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ConfigError(f"{path}: is not a regular file", hint="move it away, or name another OUT")


def is_ours(path: Path) -> bool:
    """By name, kind and first bytes: only such files may be deleted. An empty one is what a broken disk leaves."""
    named = _NAME.fullmatch(path.name) or re.fullmatch(_TENSORS_NAME, path.name) or path.name in (LOCK, ANNOUNCEMENT)
    temporary = _TEMPORARY.fullmatch(path.name)
    if not (named or temporary) or not is_regular(path):
        return False
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if temporary or not head:
                return True
            if path.suffix == ".safetensors":
                said = file.read(min(int.from_bytes(head, "little"), _MOST_TENSORS_HEADER))
                return b'"masters"' in said or b'"first"' in said
            begins = _OUT_BEGINS if path.name == ANNOUNCEMENT else _CHECKPOINT_BEGINS
            return path.name != LOCK and (head + file.read(len(begins))).startswith(begins)
    except OSError:
        return False


def unlink_ours(path: Path) -> None:
    """Delete a file if it is this program's and can be deleted."""
    if is_ours(path):
        with contextlib.suppress(OSError):
            path.unlink()


def _locked(file: BinaryIO) -> bool:
    """Lock a file for this process; false if another one has it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems know no locks
            return True
    return True


def newest_first(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and is_regular(path)]
    except OSError:
        return []
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def unfinished(folder: Path) -> list[str]:
    """Notes on tensors without the JSON file that would make them a checkpoint, newer than every one that has it."""
    newest = next((path.stem for path in newest_first(folder)), "")
    found = sorted(folder.glob("checkpoint-*.safetensors")) if folder.is_dir() else []
    return [f"{path.with_suffix('')} is incomplete (it has no JSON file)" for path in found if path.stem > newest]


def remove(folder: Path) -> None:
    """Delete this program's files, and the folder if nothing else is in it."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            unlink_ours(path)
        with contextlib.suppress(OSError):
            folder.rmdir()
