"""The embedded tokenizer, the one beside the file, and none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from cortiq_fcd.errors import TokenizerError
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.tokenizer import load_tokenizer
from tests.io.golden import GOLDEN, needs_golden
from tests.io.small_text_model import tokenizer_json, write_text_model

TEXTS = ["", "it is a truth", "naïve — café 🙂👍🏽", "  two  spaces\n\n\tand a tab\r\n", "<|end|>and<|end|>"]
TEXTS += ["日本語 Привет", "x" * 500]


def test_embedded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not looked at")
    with open_model(write_text_model(tmp_path / "m.cmf")) as model:
        tokenizer = load_tokenizer(model)
    oracle = tokenizers.Tokenizer.from_str(tokenizer_json())
    assert tokenizer.embedded
    assert "vocab section" in tokenizer.source
    assert tokenizer.vocab_size == oracle.get_vocab_size()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64
        assert ids.tolist() == oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_nothing_is_added_cut_or_padded(tmp_path: Path) -> None:
    """A tokenizer.json may ask for all three."""
    asking = json.loads(tokenizer_json())
    asking["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    asking["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"}
    single = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}}
    asking["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }
    plain, text = tokenizers.Tokenizer.from_str(tokenizer_json()), "it is a truth universally acknowledged"
    with open_model(write_text_model(tmp_path / "m.cmf", json.dumps(asking).encode())) as model:
        assert load_tokenizer(model).encode(text).tolist() == plain.encode(text).ids


def test_special_tokens_can_be_left_out(tmp_path: Path) -> None:
    with open_model(write_text_model(tmp_path / "m.cmf")) as model:
        tokenizer = load_tokenizer(model)
    ids = tokenizer.encode("one<|end|>")
    assert tokenizer.decode(ids) == "one<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "one"


def test_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    with open_model(write_text_model(tmp_path / "m.cmf", None)) as model:
        tokenizer = load_tokenizer(model)
    assert not tokenizer.embedded
    assert tokenizer.source == str(tmp_path / "tokenizer.json")
    assert len(tokenizer.encode("it is")) > 0


def test_none(tmp_path: Path) -> None:
    with open_model(write_text_model(tmp_path / "m.cmf", None)) as model, pytest.raises(TokenizerError) as caught:
        load_tokenizer(model)
    assert str(tmp_path / "tokenizer.json") in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[]", b'{"model": 3}', b"null", tokenizer_json().encode()[:-40]])
@pytest.mark.parametrize("embedded", [True, False])
def test_unreadable(tmp_path: Path, data: bytes, embedded: bool) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    path = write_text_model(tmp_path / "m.cmf", data if embedded else None)
    with open_model(path) as model, pytest.raises(TokenizerError) as caught:
        load_tokenizer(model)
    assert ("vocab section" if embedded else "tokenizer.json") in caught.value.message
    assert caught.value.hint


@needs_golden
def test_reference_ids() -> None:
    with open_model(GOLDEN / "models" / "tiny-qwen3.cmf") as model:
        tokenizer = load_tokenizer(model)
    for case in json.loads((GOLDEN / "models" / "tokenizer_cases.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"]).tolist() == case["ids"], case["text"]
