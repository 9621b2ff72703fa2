"""Checkpoints of a running polish in OUT.partial/, so that a killed run goes on and ends with the same bytes.

The two newest are kept, whoever wrote them. One that belongs to other input, options, versions or threads is not used;
it goes when the run at hand has saved twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from cortiq_fcd.errors import CortiqError
from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.io.hashing import hash64
from cortiq_fcd.io.paths import is_regular
from cortiq_fcd.io.tensor_file import F32, InPieces, StoredVector, open_tensors, write_tensors
from cortiq_fcd.model.vectors import OnRank0, Vector
from cortiq_fcd.stages import checkpoint_folder
from cortiq_fcd.stages.artefacts import Before, TrainingRecord, TrainingState
from cortiq_fcd.stages.checkpoint_folder import (
    ANNOUNCEMENT,
    finished,
    folder_of,
    free_name,
    is_ours,
    newest_first,
    remove,
    unfinished,
    unlink_ours,
)

FORMAT = "cortiq-fcd-checkpoint/2"
GENERATIONS = 2
# Facts of an identity that may both differ when the first one does.
PROCESSES, THREADS = "the number of processes", "the number of threads"
UNKNOWN = "not known yet"  # a fact of an identity that agrees with every other


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
        damaged = unfinished(self.folder)
        differences: tuple[str, ...] = ()
        for path in newest_first(self.folder):
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

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Make and hold the folder inside the block; raises as `checkpoint_folder.at_work` does."""
        return checkpoint_folder.at_work(
            self.folder, may_go=lambda: self._thread is None or not self._thread.is_alive()
        )

    def save(self, state: TrainingState, before: Before, *, copies: bool = True) -> None:
        """Copy the state and write it in the background, or write it at once where there is no memory for `copies`.

        Raises what the previous write raised, as `wait` does.
        """
        self.wait()
        tensors = {"masters": state.masters, "first": state.first, "second": state.second}
        vectors = {name: _on_cpu(vector, copy=copies) for name, vector in tensors.items()}
        if state.best is not None:
            vectors["best"] = _on_cpu(state.best, copy=False)  # a best state is replaced, never changed
        if state.average is not None:
            vectors["average"] = _on_cpu(state.average, copy=copies)
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
        write_atomically(self.folder / ANNOUNCEMENT, lambda file: file.write(text))

    def has_announced(self, record: Any) -> bool:
        """Whether an OUT with this record comes from this very run."""
        try:
            said = json.loads((self.folder / ANNOUNCEMENT).read_bytes())
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
            if all(is_ours(path) for path in self.folder.iterdir()):
                # In one move, so that a kill in between leaves no half of a checkpoint beside a finished OUT.
                remove(self.folder.rename(finished(self.folder)))
            else:
                remove(self.folder)
        except OSError as error:
            return [f"{self.folder} could not be removed ({error.strerror})"]
        return [f"{self.folder} holds files that are not this program's: it stays"] if self.folder.exists() else []

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _write(self, record: TrainingRecord, tensors: dict[str, F32 | InPieces], before: Before) -> None:
        try:
            path = free_name(self.folder)
            tensors_hash = write_tensors(path.with_suffix(".safetensors"), tensors)
            body = asdict(Body(FORMAT, self._identity, before, record, tensors_hash))
            text = json.dumps({"hash64": _hash(body), "body": body}).encode()
            write_atomically(path, lambda file: file.write(text))
            self.saved_step = record.step
            self._prune()
        except Exception as error:
            self._failure = error

    def _prune(self) -> None:
        for old in newest_first(self.folder)[GENERATIONS:]:
            # Its marker first: without one it is no checkpoint any more.
            for path in (old, old.with_suffix(".safetensors")):
                unlink_ours(path)


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
    return TrainingState(record, stored["masters"], stored["first"], stored["second"], best, stored.get("average"))


def _on_cpu(vector: Vector, *, copy: bool) -> F32 | InPieces:
    if isinstance(vector, Tensor):
        return vector.to("cpu", copy=copy).numpy()
    assert not isinstance(vector, OnRank0)  # what is saved is here
    return vector


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


def _first_line(error: Exception) -> str:
    text = error.message if isinstance(error, CortiqError) else str(error)
    return text.splitlines()[0] if text else type(error).__name__
