"""Where training and validation tokens come from, how they are cut and split, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from cortiq_fcd.errors import CorpusError, TokenizerError
from cortiq_fcd.io.corpus import Corpus, check_lengths, load_corpus
from cortiq_fcd.io.reader import CmfModel, open_model
from tests.io.golden import GOLDEN, needs_golden
from tests.io.small_text_model import VOCAB_SIZE, tokenizer_json, write_text_model

TEXT = "it is a truth universally acknowledged; must be in want — naïve 🙂. " * 20


@pytest.fixture
def model(tmp_path: Path) -> Iterator[CmfModel]:
    with open_model(write_text_model(tmp_path / "m.cmf")) as opened:
        yield opened


def load(model: CmfModel, train: Path | None, val: Path | None = None, **limits: int) -> Corpus:
    sizes = {"max_train_bytes": 2_000_000, "max_val_bytes": 200_000} | limits
    return load_corpus(train=train, val=val, model=model, **sizes)


def encode(text: str) -> list[int]:
    return list(tokenizers.Tokenizer.from_str(tokenizer_json()).encode(text, add_special_tokens=False).ids)


def npy(ids: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, ids)
    return stream.getvalue()


def test_two_texts(model: CmfModel, tmp_path: Path) -> None:
    train, val = tmp_path / "train.txt", tmp_path / "val.text"
    train.write_bytes(TEXT.encode())
    val.write_bytes(b"in want of\r\nacknowledged")
    corpus = load(model, train, val)
    assert corpus.train.tolist() == encode(TEXT)
    assert corpus.val.tolist() == encode("in want of\r\nacknowledged")  # line ends are not touched
    assert corpus.train.dtype == corpus.val.dtype == np.int64
    assert not corpus.train.flags.writeable
    assert corpus.train_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert corpus.val_sha256 == hashlib.sha256(val.read_bytes()).hexdigest()
    assert str(train) in corpus.source
    assert str(val) in corpus.source
    assert corpus.notes == ()


@pytest.mark.parametrize("count", [1, 9, 10, 19, 20, 1234])
def test_last_tenth_is_held_out(model: CmfModel, tmp_path: Path, count: int) -> None:
    path = tmp_path / "ids.npy"
    ids = np.arange(count) % VOCAB_SIZE
    np.save(path, ids)
    corpus = load(model, path)
    assert len(corpus.val) == count // 10
    assert np.concatenate([corpus.train, corpus.val]).tolist() == ids.tolist()
    assert corpus.val_sha256 == corpus.train_sha256


def test_no_target_of_a_training_window_is_held_out(model: CmfModel, tmp_path: Path) -> None:
    path, seq = tmp_path / "ids.npy", 16
    np.save(path, np.arange(250))  # an id is its own position
    corpus = load(model, path)
    last_offset = len(corpus.train) - seq - 2  # the sampler draws below len - seq - 1
    targets = corpus.train[last_offset + 1 : last_offset + 1 + seq]
    assert len(targets) == seq
    assert targets.max() < corpus.val.min()


def test_text_is_cut_at_a_character(model: CmfModel, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("ab🙂é—z", encoding="utf-8")  # 2 + 4 + 2 + 3 + 1 bytes
    kept = {
        2: "ab",
        3: "ab",
        5: "ab",
        6: "ab🙂",
        7: "ab🙂",
        8: "ab🙂é",
        10: "ab🙂é",
        11: "ab🙂é—",
        12: "ab🙂é—z",
        13: "ab🙂é—z",
    }
    for limit, text in kept.items():
        corpus = load(model, path, path, max_train_bytes=limit)
        assert corpus.train.tolist() == encode(text), limit
        assert corpus.train_sha256 == hashlib.sha256(text.encode()).hexdigest()
        cut = [note for note in corpus.notes if "only the first" in note]
        assert (len(cut) == 1) == (limit < 12)
        assert not cut or f"first {len(text.encode())} bytes" in cut[0]


def test_what_is_cut_off_need_not_be_utf8(model: CmfModel, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"good" + b"\xff" * 10)
    assert load(model, path, max_train_bytes=4).train.tolist() == encode("good")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, ">i4", np.uint64, np.int64])
def test_npy_of_any_integer_dtype(model: CmfModel, tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "ids.NPY"
    path.write_bytes(npy(np.array([1, 2, 255, 0] * 100, dtype)))
    corpus = load(model, path, path, max_train_bytes=10, max_val_bytes=10)  # ids are never cut
    assert corpus.train.tolist() == [1, 2, 255, 0] * 100
    assert corpus.train_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_json(model: CmfModel, tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text("[1, 2, 299]")
    assert load(model, path).train.tolist() == [1, 2, 299]


def test_ids_need_no_tokenizer_and_text_does(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    (tmp_path / "t.txt").write_text("text")
    with open_model(write_text_model(tmp_path / "m.cmf", None)) as model:
        assert load(model, tmp_path / "ids.json").train.tolist() == [1, 2, 3]
        with pytest.raises(TokenizerError):
            load(model, tmp_path / "t.txt")
        (tmp_path / "tokenizer.json").write_text(tokenizer_json())
        corpus = load(model, tmp_path / "t.txt")
    assert corpus.train.tolist() == encode("text")
    assert any("tokenizer.json" in note for note in corpus.notes)


def test_validating_on_the_training_text_is_said(model: CmfModel, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    assert any("is the training text" in note for note in load(model, tmp_path / "a.txt", tmp_path / "b.txt").notes)


def test_built_in_text(model: CmfModel) -> None:
    corpus = load(model, None, max_train_bytes=5000)
    data = (resources.files("cortiq_fcd") / "data" / "austen.txt").read_bytes()
    assert len(data) <= 2_000_000  # whole at the default limit
    assert np.concatenate([corpus.train, corpus.val]).tolist() == encode(data[:5000].decode(errors="ignore"))
    assert "built-in" in corpus.source
    assert data.index(b"Persuasion, by Jane Austen") < 0.89 * len(data)  # with some room for other tokenizers


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.txt", b"", ["empty"]),
        ("t.npy", b"", ["empty"]),
        ("t.txt", b"fine\xff", ["UTF-8", "0xff at byte 4"]),
        ("t.txt", "ab🙂".encode()[:-1], ["UTF-8", "at byte 2"]),
        ("t.txt", "utf-16".encode("utf-16"), ["UTF-8", "at byte 0"]),
        ("t.npy", b"not numpy", [".npy"]),
        ("t.npy", npy(np.arange(9))[:-1], [".npy"]),
        ("t.npy", npy(np.arange(9)).replace(b"(9,)", b"(9),"), [".npy"]),
        ("t.npy", npy(np.arange(9)).replace(b"(9,), }          ", b"(999999999999,), }"), [".npy"]),
        ("t.npy", npy(np.ones(4)), ["integer", "float64"]),
        ("t.npy", npy(np.ones(4, bool)), ["integer", "bool"]),
        ("t.npy", npy(np.ones((2, 2), int)), ["one-dimensional", "[2, 2]"]),
        ("t.npy", npy(np.int64(4)), ["one-dimensional", "[]"]),
        ("t.npy", npy(np.zeros(0, int)), ["no tokens"]),
        ("t.npy", npy(np.array([0, VOCAB_SIZE - 1, VOCAB_SIZE, 999])), ["token id 300 at position 2", "0 to 299"]),
        ("t.npy", npy(np.array([0, -1])), ["token id -1 at position 1"]),
        ("t.npy", npy(np.array([1, 2**64 - 1], np.uint64)), [f"token id {2**64 - 1} at position 1"]),
        ("t.json", b"[1, 2", ["JSON"]),
        ("t.json", b"\xff", ["JSON"]),
        ("t.json", b"[" * 100_000, ["JSON"]),
        ("t.json", b'{"ids": [1]}', ["list", "dict"]),
        ("t.json", b"[]", ["no tokens"]),
        ("t.json", b"[1, 2.0]", ["2.0 at position 1"]),
        ("t.json", b"[true]", ["True at position 0"]),
        ("t.json", b'[3, "4"]', ["'4' at position 1"]),
        ("t.json", b"[[1]]", ["position 0"]),
        ("t.json", b"[1, 300]", ["token id 300 at position 1", "0 to 299"]),
        ("t.json", json.dumps([5, 10**30]).encode(), [f"token id {10**30} at position 1"]),
    ],
)
def test_refused(model: CmfModel, tmp_path: Path, name: str, data: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(CorpusError) as caught:
        load(model, path)
    for word in [str(path), *words]:
        assert word in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 5


def test_objects_in_npy_are_not_unpickled(model: CmfModel, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([1, 2], dtype=object), allow_pickle=True)
    with pytest.raises(CorpusError, match="not a readable"):
        load(model, path)


def test_no_file_and_no_room(model: CmfModel, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file"):
        load(model, tmp_path / "absent.txt")
    with pytest.raises(CorpusError, match="got a directory"):
        load(model, tmp_path)
    (tmp_path / "t.txt").write_text("🙂🙂", encoding="utf-8")
    with pytest.raises(CorpusError, match="no tokens"):
        load(model, tmp_path / "t.txt", max_train_bytes=3)


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("acknowledged")
    with (
        open_model(write_text_model(tmp_path / "m.cmf", vocab_size=260)) as model,
        pytest.raises(
            CorpusError, match="token id 268 at position 1 is outside the model's vocabulary: expected 0 to 259"
        ),
    ):
        load(model, tmp_path / "t.txt")


def corpus_of(train: int, val: int) -> Corpus:
    return Corpus(np.zeros(train, np.int64), np.zeros(val, np.int64), "", "", "made up")


def test_lengths() -> None:
    assert check_lengths(corpus_of(18, 26), seq=16, batch=5) == ()
    assert check_lengths(corpus_of(18, 17), seq=16, batch=1) == (
        "the validation text holds only 1 distinct windows of 16 tokens, 2 are measured",
    )
    too_short = [(17, 17, "training.*at least 18 tokens, got 17"), (18, 16, "validation.*17 tokens, got 16")]
    for train, val, words in too_short:
        with pytest.raises(CorpusError, match=words) as caught:
            check_lengths(corpus_of(train, val), seq=16, batch=2)
        assert "--seq" in caught.value.hint


@needs_golden
def test_reference_ids() -> None:
    folder = GOLDEN / "models"
    with open_model(folder / "tiny-qwen3.cmf") as model:
        corpus = load(model, folder / "train.txt", folder / "val.txt")
        same = load(model, folder / "train_ids.npy", folder / "val_ids.npy")
    assert np.array_equal(corpus.train, np.load(folder / "train_ids.npy"))
    assert np.array_equal(corpus.val, np.load(folder / "val_ids.npy"))
    assert np.array_equal(corpus.train, same.train)
    assert np.array_equal(corpus.val, same.val)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("ending", [".txt", ".npy", ".json"])
def test_only_regular_files_are_read(model: CmfModel, tmp_path: Path, kind: str, ending: str) -> None:
    path = tmp_path / f"pipe{ending}"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(CorpusError, match="regular file"):
        load(model, path)


def test_a_name_that_no_file_can_have(model: CmfModel, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="can't be read"):
        load(model, tmp_path / ("x" * 500))


@pytest.mark.parametrize("dtype", ["m8[s]", "M8[s]", "?", "f8", "O"])
def test_what_is_no_integer_is_no_id(model: CmfModel, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(20).astype(dtype) if dtype != "?" else np.ones(20, bool))
    with pytest.raises(CorpusError):
        load(model, path)


def test_any_damaged_byte_of_an_npy_header(model: CmfModel, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    whole = npy(np.arange(40) % VOCAB_SIZE)
    for at in range(128):
        for byte in (0, 10, 39, 40, 92, 255):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            with contextlib.suppress(CorpusError):
                load(model, path)
