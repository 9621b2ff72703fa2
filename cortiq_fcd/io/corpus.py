"""Training and validation tokens: from text through the model's tokenizer, or from files of ids.

Text is cut to so many bytes, at a character; files of ids are used whole. Without a validation file the last tenth of
the training tokens is held out. The two share no token: a window and its shifted target stay inside their own array.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from cortiq_fcd.errors import CorpusError
from cortiq_fcd.io.planned import AnyModel
from cortiq_fcd.io.tokenizer import Ids, Tokenizer, load_tokenizer

BUILTIN = "austen.txt"
HELD_OUT_SHARE = 10  # one token in so many, at the end


@dataclass(frozen=True, eq=False)
class Corpus:
    """What is trained on and what is measured on.

    train, val: token ids [N], int64, read-only. The sha256 are of the bytes used (of text, what is left after the cut);
    when val is held out of the training text both are that text's. `notes` is what a user must be told.
    """

    train: Ids
    val: Ids
    train_sha256: str
    val_sha256: str
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Text:
    """One text as token ids [N], int64, read-only; the sha256 is of the bytes used. `notes` is for the user."""

    ids: Ids
    sha256: str
    source: str
    notes: tuple[str, ...]


def load_corpus(
    *, train: Path | None, val: Path | None, max_train_bytes: int, max_val_bytes: int, model: AnyModel
) -> Corpus:
    """Reads and tokenizes both texts. `train` None is the built-in text, `val` None holds out the end of its tokens.

    Paths that end in .npy (one-dimensional, any integer dtype) or .json (a list of integers) hold token ids.
    Raises CorpusError for what can't be read or holds no or wrong ids, TokenizerError when text meets no tokenizer.
    """
    reader = _Reader(model)
    trained = reader.read(train, max_train_bytes)
    if val is None:
        trained, validated = _held_out(trained)
    else:
        validated = reader.read(val, max_val_bytes)
    notes = (*trained.notes, *validated.notes, *reader.notes())
    if val is not None and validated.sha256 == trained.sha256:
        notes += (f"{val}: the validation text is the training text, so that perplexities show memory, not repair",)
    return Corpus(
        train=trained.ids,
        val=validated.ids,
        train_sha256=trained.sha256,
        val_sha256=validated.sha256,
        source=f"train: {trained.source}; val: {validated.source}",
        notes=notes,
    )


def load_text(*, text: Path | None, max_bytes: int, model: AnyModel) -> Text:
    """The validation text alone, as a polish has it: the end of the built-in text where `text` is None.

    Raises as `load_corpus`.
    """
    reader = _Reader(model)
    if text is not None:
        found = reader.read(text, max_bytes)
    else:
        whole = reader.built_in()
        end = _held_out(whole)[1]
        found = Text(end.ids, end.sha256, f"{whole.source}: {end.source}", ())
    return Text(found.ids, found.sha256, found.source, (*found.notes, *reader.notes()))


def _held_out(trained: Text) -> tuple[Text, Text]:
    """A training text without its last tenth, and that tenth."""
    held_out = len(trained.ids) // HELD_OUT_SHARE
    split = len(trained.ids) - held_out
    validated = Text(trained.ids[split:], trained.sha256, "its last tenth", ())
    return Text(trained.ids[:split], trained.sha256, trained.source, trained.notes), validated


def check_lengths(corpus: Corpus, seq: int, batch: int) -> tuple[str, ...]:
    """Whether windows of `seq` tokens and their shifted targets fit. Notes for the user, or a CorpusError.

    A training window starts at one of len - seq - 1 offsets, of which there must be one; a validation window may start
    at 0 .. len - seq - 1. The quick validation is 2 * batch windows; a text with fewer distinct ones is noted.
    """
    for name, found, needed in (("training", len(corpus.train), seq + 2), ("validation", len(corpus.val), seq + 1)):
        if found < needed:
            raise CorpusError(
                f"the {name} text is too short for windows of {seq} tokens: expected at least {needed} tokens, got"
                f" {found} ({corpus.source})",
                hint="give a longer text or a smaller --seq; without --val-corpus the last tenth validates",
            )
    windows, distinct = 2 * batch, len(corpus.val) - seq
    if distinct < windows:
        return (f"the validation text holds only {distinct} distinct windows of {seq} tokens, {windows} are measured",)
    return ()


class _Reader:
    """Reads files for one model; the tokenizer is loaded when the first text needs it, and once."""

    def __init__(self, model: AnyModel) -> None:
        self._model = model
        self._vocab_size = int(model.arch["vocab_size"])
        self._tokenizer: Tokenizer | None = None

    def read(self, path: Path | None, max_bytes: int) -> Text:
        if path is None:
            return self.built_in(max_bytes)
        kind = path.suffix.lower()
        data = _read_bytes(path, None if kind in (".npy", ".json") else max_bytes + 1)
        if not data:
            raise CorpusError(f"{path}: the file is empty: expected text or token ids", hint="give another file")
        if kind == ".npy":
            return self._ids(_npy_ids(path, data), data, str(path))
        if kind == ".json":
            return self._ids(_json_ids(path, data), data, str(path))
        return self._text(data, str(path), max_bytes)

    def built_in(self, max_bytes: int | None = None) -> Text:
        data = (resources.files("cortiq_fcd") / "data" / BUILTIN).read_bytes()
        return self._text(data, "built-in text (Jane Austen)", len(data) if max_bytes is None else max_bytes)

    def notes(self) -> tuple[str, ...]:
        if self._tokenizer is None or self._tokenizer.embedded:
            return ()
        return (f"the model file has no tokenizer: {self._tokenizer.source} was used",)

    def _text(self, data: bytes, source: str, max_bytes: int) -> Text:
        used = _cut(data, max_bytes)
        notes = (f"{source}: only the first {len(used)} bytes are used",) if len(used) < len(data) else ()
        try:
            text = used.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{source}: not UTF-8 text: expected UTF-8, got byte 0x{used[error.start]:02x} at byte {error.start}",
                hint="convert the file to UTF-8; token ids go into a .npy or .json file",
            ) from error
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model)
        return self._ids(self._tokenizer.encode(text), used, source, notes)

    def _ids(self, ids: Any, data: bytes, source: str, notes: tuple[str, ...] = ()) -> Text:
        """Checks the range before the cast to int64, which could wrap."""
        if len(ids) == 0:
            raise CorpusError(f"{source}: no tokens: expected token ids, got none", hint="give a longer text")
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            raise CorpusError(
                f"{source}: token id {ids[wrong[0]]} at position {wrong[0]} is outside the model's vocabulary: expected"
                f" 0 to {self._vocab_size - 1}",
                hint="the ids must come from this model's own tokenizer",
            )
        checked = np.array(ids, dtype=np.int64)
        checked.flags.writeable = False
        return Text(checked, hashlib.sha256(data).hexdigest(), source, notes)


def _read_bytes(path: Path, limit_bytes: int | None) -> bytes:
    hint = "give a text file, or token ids as .npy or .json"
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise CorpusError(f"{path}: expected a file, got a directory", hint=hint)
        if not stat.S_ISREG(mode):  # a pipe may never end, and can't be read a second time by a run that goes on
            raise CorpusError(f"{path}: expected a regular file, got a pipe, a socket or a device", hint=hint)
        with path.open("rb") as stream:
            return stream.read() if limit_bytes is None else stream.read(limit_bytes)
    except OSError as error:
        raise CorpusError(f"{path}: can't be read: {error.strerror}", hint=hint) from error


def _cut(data: bytes, max_bytes: int) -> bytes:
    """At most max_bytes, and no character cut in two (bytes 10xxxxxx continue one)."""
    if len(data) <= max_bytes:
        return data
    end = max_bytes
    while end > 0 and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def _npy_ids(path: Path, data: bytes) -> Any:
    hint = "write it with numpy.save(path, ids), ids one-dimensional and of an integer dtype"
    try:
        ids = np.load(io.BytesIO(data), allow_pickle=False)
    # A damaged header can fail anywhere in numpy's parser (tokenize and struct have exceptions of their own), or claim
    # a shape that no memory holds.
    except Exception as error:
        raise CorpusError(f"{path}: not a readable .npy file: {error}", hint=hint) from error
    # Not issubdtype: to it a time span is an integer.
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else "a .npz archive"
        raise CorpusError(f"{path}: expected one-dimensional integer token ids, got {got}", hint=hint)
    return ids


def _json_ids(path: Path, data: bytes) -> Any:
    hint = "the file must hold one JSON list of integers, such as [17, 4, 911]"
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not readable JSON: {error}", hint=hint) from error
    if not isinstance(values, list):
        raise CorpusError(f"{path}: expected a list of token ids, got {type(values).__name__}", hint=hint)
    for position, value in enumerate(values):
        if type(value) is not int:  # bool is an int to isinstance
            raise CorpusError(f"{path}: expected integers, got {value!r:.40} at position {position}", hint=hint)
    return np.array(values, dtype=object)  # integers of any size: the range check comes next
