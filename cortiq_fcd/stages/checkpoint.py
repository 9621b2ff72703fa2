"""Checkpoints of a running polish in OUT.partial/, so that a killed run goes on and ends with the same bytes.

    OUT.partial/checkpoint-000007.safetensors    masters, both moments, the best state: flat f32 vectors
    OUT.partial/checkpoint-000007.json           everything else, and both hashes; written last: the mark of a whole one
    OUT.partial/best-000025.safetensors          the best state of step 25, while a run with a memory budget is at work
    OUT.partial/lock                             held while a run is at work
    OUT.partial/out.json                         the record of the OUT that is being written

The two newest are kept, whoever wrote them. One that belongs to other input, options, versions or threads is not used;
it goes when the run at hand has saved twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from cortiq_fcd.errors import ConfigError, CortiqError, ResourceError
from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.io.hashing import hash64
from cortiq_fcd.io.paths import is_regular
from cortiq_fcd.io.tensor_file import F32, StoredVector, open_tensors, write_tensors
from cortiq_fcd.stages.artefacts import Before, TrainingRecord, TrainingState, Vector

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "cortiq-fcd-checkpoint/2"
GENERATIONS = 2
# Facts of an identity that may both differ when the first one does.
PROCESSES, THREADS = "the number of processes", "the number of threads"
UNKNOWN = "not known yet"  # a fact of an identity that agrees with every other
_NAME = re.compile(r"checkpoint-(\d{6,})\.json")
_TENSORS = re.compile(r"(checkpoint|best)-(\d{6,})\.safetensors")
_TEMPORARY = re.compile(r"\.((checkpoint|best)-\d{6,}\.(json|safetensors)|out\.json)\.[0-9a-f]{16}\.partial")
_CHECKPOINT_BEGINS, _OUT_BEGINS = b'{"hash64":', b'{"identity":'
_MOST_TENSORS_HEADER = 1 << 12  # bytes; those of ours name four tensors


@dataclass(frozen=True)
class Body:
    """What the JSON file of a checkpoint says."""

    format: str
    identity: dict[str, str]
    before: Before
    record: TrainingRecord
    tensors_hash64: str


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint that belongs to the run at hand. `processes`: how many wrote it."""

    processes: str
    before: Before
    state: TrainingState


@dataclass(frozen=True)
class Found:
    """What a search for a checkpoint came to: the newest one that can be used, and why newer ones can't."""

    checkpoint: Checkpoint | None
    damaged: tuple[str, ...]
    differences: tuple[str, ...]  # of the newest whole one that belongs to another run


def folder_of(out: Path) -> Path:
    """Where the checkpoints of a polish into `out` lie."""
    return out.with_name(out.name + ".partial")


def finished_of(out: Path) -> Path:
    """What the folder is called for the moment in which it is removed."""
    return _finished(folder_of(out))


def check_folder(out: Path) -> None:
    """ConfigError if something that is not this program's stands where checkpoints into `out` would go."""
    folder = folder_of(out)
    hint = "move it away, or name another OUT"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder}: is no directory, and checkpoints go into one of this name", hint=hint)
    for path in (folder / "lock", folder / "out.json"):
        if os.path.lexists(path) and not _is_ours(path):
            raise ConfigError(f"{path}: is not this program's, and checkpoints need the name", hint=hint)


class Checkpoints:
    """The checkpoints of one run. `identity` is what must be equal for a run to end with the same bytes, by name."""

    def __init__(self, out: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder_of(out)
        self.saved_step: int | None = None
        self._identity = dict(identity)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def find(self) -> Found:
        """The newest usable checkpoint; its tensors are checked, and stay in the file until they are wanted."""
        damaged = _unfinished(self.folder)
        differences: tuple[str, ...] = ()
        for path in _newest_first(self.folder):
            try:
                body = _read_body(path)
                others = _differences(body.identity, self._identity)
                if others:
                    differences = differences or others
                    continue
                tensors_path = path.with_suffix(".safetensors")
                if os.path.lexists(tensors_path) and not is_regular(tensors_path):
                    raise ValueError(f"{tensors_path.name} is not a regular file")
                state = _state(body.record, open_tensors(tensors_path, body.tensors_hash64))
            except (ValueError, KeyError, OSError) as error:
                damaged.append(f"{path.with_suffix('')} is damaged or incomplete ({_first_line(error)})")
                continue
            self.saved_step = body.record.step
            processes = body.identity.get(PROCESSES, "1")
            return Found(Checkpoint(processes, body.before, state), tuple(damaged), differences)
        return Found(None, tuple(damaged), differences)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Make the folder and hold its lock inside the block; an empty folder goes at the end.

        ConfigError if another run is at work there, ResourceError if it can't be made.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            lock = _open_lock(self.folder / "lock")
        except OSError as error:
            raise ResourceError(f"{self.folder}: can't be written ({error.strerror})") from error
        with lock:
            if not _locked(lock):
                raise ConfigError(f"{self.folder}: another run is at work there", hint="name another OUT")
            _remove(_finished(self.folder))
            try:
                yield
            finally:
                for best in self.folder.glob("best-*.safetensors"):  # checkpoints hold copies
                    _unlink_ours(best)
                writing = self._thread is not None and self._thread.is_alive()
                if not writing and [path.name for path in self.folder.glob("*")] == ["lock"]:
                    _remove(self.folder)

    def save(self, state: TrainingState, before: Before, *, copies: bool = True) -> None:
        """Copy the state and write it in the background, or write it at once where there is no memory for `copies`.

        Raises what the previous write raised, as `wait` does.
        """
        self.wait()
        tensors = {"masters": state.masters, "first": state.first, "second": state.second}
        vectors = {name: _on_cpu(vector, copy=copies) for name, vector in tensors.items()}
        if state.best is not None:
            vectors["best"] = _on_cpu(state.best, copy=False)  # a best state is replaced, never changed
        if not copies:
            self._write(state.record, vectors, before)
            return
        self._thread = threading.Thread(target=self._write, args=(state.record, vectors, before), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what is being written is written. Raises what went wrong (ResourceError: no room, or no right to)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def announce(self, record: dict[str, Any]) -> None:
        """Say that an OUT with this record is about to be written: if it is there later, it is this run's own."""
        text = json.dumps({"identity": self._identity, "fcd": record}).encode()
        write_atomically(self.folder / "out.json", lambda file: file.write(text))

    def has_announced(self, record: Any) -> bool:
        """Whether an OUT with this record comes from this very run."""
        try:
            said = json.loads((self.folder / "out.json").read_bytes())
        except (OSError, ValueError):
            return False
        known = isinstance(said, dict) and isinstance(said.get("identity"), dict)
        return (
            record is not None
            and known
            and not _differences(said["identity"], self._identity)
            and said.get("fcd") == record
        )

    def clear(self) -> list[str]:
        """Remove the folder, at the end of a run. Files of others stay, and a note says so."""
        try:
            if all(_is_ours(path) for path in self.folder.iterdir()):
                # In one move, so that a kill in between leaves no half of a checkpoint beside a finished OUT.
                _remove(self.folder.rename(_finished(self.folder)))
            else:
                _remove(self.folder)
        except OSError as error:
            return [f"{self.folder} could not be removed ({error.strerror})"]
        return [f"{self.folder} holds files that are not this program's: it stays"] if self.folder.exists() else []

    def _write(self, record: TrainingRecord, tensors: dict[str, F32 | StoredVector], before: Before) -> None:
        try:
            path = _free_name(self.folder)
            tensors_hash = write_tensors(path.with_suffix(".safetensors"), tensors)
            body = asdict(Body(FORMAT, self._identity, before, record, tensors_hash))
            text = json.dumps({"hash64": _hash(body), "body": body}).encode()
            write_atomically(path, lambda file: file.write(text))
            self.saved_step = record.step
            self._prune()
        except Exception as error:
            self._failure = error

    def _prune(self) -> None:
        for old in _newest_first(self.folder)[GENERATIONS:]:
            # Its marker first: without one it is no checkpoint any more.
            for path in (old, old.with_suffix(".safetensors")):
                _unlink_ours(path)


def _free_name(folder: Path) -> Path:
    """The next JSON file, with no other's tensors under its number."""
    number = next((_number(path) for path in _newest_first(folder)), 0) + 1
    while True:
        path = folder / f"checkpoint-{number:06d}.json"
        tensors = path.with_suffix(".safetensors")
        if not os.path.lexists(path) and (not os.path.lexists(tensors) or _is_ours(tensors)):
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


def _is_ours(path: Path) -> bool:
    """By name, kind and first bytes: only such files may be deleted. An empty one is what a broken disk leaves."""
    named = _NAME.fullmatch(path.name) or _TENSORS.fullmatch(path.name) or path.name in ("lock", "out.json")
    temporary = _TEMPORARY.fullmatch(path.name)
    if not (named or temporary) or not is_regular(path):
        return False
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if temporary or not head:
                return True
            if path.suffix == ".safetensors":
                return b'"masters"' in file.read(min(int.from_bytes(head, "little"), _MOST_TENSORS_HEADER))
            begins = _OUT_BEGINS if path.name == "out.json" else _CHECKPOINT_BEGINS
            return path.name != "lock" and (head + file.read(len(begins))).startswith(begins)
    except OSError:
        return False


def _unlink_ours(path: Path) -> None:
    if _is_ours(path):
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


def _newest_first(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and is_regular(path)]
    except OSError:
        return []
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _unfinished(folder: Path) -> list[str]:
    """Notes on tensors without the JSON file that would make them a checkpoint, newer than every one that has it."""
    newest = next((path.stem for path in _newest_first(folder)), "")
    found = sorted(folder.glob("checkpoint-*.safetensors")) if folder.is_dir() else []
    return [f"{path.with_suffix('')} is incomplete (it has no JSON file)" for path in found if path.stem > newest]


def _hash(body: dict[str, Any]) -> str:
    return f"{hash64(json.dumps(body, sort_keys=True).encode()):016x}"


def _read_body(path: Path) -> Body:
    """Raises ValueError for anything but a whole one of this format."""
    try:
        said = json.loads(path.read_bytes())
        body, recorded = said["body"], said["hash64"]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a checkpoint's: {error!r}") from None
    if _hash(body) != recorded:
        raise ValueError(f"the hash of {path.name} is wrong")
    if body.get("format") != FORMAT:
        raise ValueError(f"its format is {body.get('format')!r}, expected {FORMAT!r}")
    try:
        return TypeAdapter(Body).validate_python(body)
    except ValidationError as error:
        raise ValueError(f"{path.name}: {_first_line(error)}") from None


def _state(record: TrainingRecord, stored: Mapping[str, StoredVector]) -> TrainingState:
    best = stored["best"] if record.best is not None and record.best.step else None
    return TrainingState(record, stored["masters"], stored["first"], stored["second"], best)


def _on_cpu(vector: Vector, *, copy: bool) -> F32 | StoredVector:
    return vector if isinstance(vector, StoredVector) else vector.to("cpu", copy=copy).numpy()


def _differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Another number of processes is none, and then neither is another number of threads: sums are taken in another
    order, which changes the result by no more than rounding does.
    """
    regrouped = {PROCESSES, THREADS} if recorded.get(PROCESSES) != now.get(PROCESSES) else set()
    names = [name for name in {**now, **recorded} if name not in regrouped]
    return tuple(
        f"{name} was {recorded.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in names
        if now.get(name) not in (UNKNOWN, recorded.get(name))
    )


def _finished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.finished")


def _remove(folder: Path) -> None:
    """Delete our files, and the folder if nothing else is in it."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            _unlink_ours(path)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _first_line(error: Exception) -> str:
    text = error.message if isinstance(error, CortiqError) else str(error)
    return text.splitlines()[0] if text else type(error).__name__
