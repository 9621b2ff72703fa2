"""A .cmf of almost nothing with a real tokenizer in it: 300 entries, byte level, learned from three lines."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.writer import create_model

VOCAB_SIZE = 300
LINES = ["it is a truth universally acknowledged", "that a single man in possession", "must be in want of a wife"]


@functools.cache
def tokenizer_json() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return str(tokenizer.to_str())


def write_text_model(path: Path, vocab: bytes | None = b"default", vocab_size: int = VOCAB_SIZE) -> Path:
    """A model file at `path`; vocab None leaves the section out."""
    if vocab == b"default":
        vocab = tokenizer_json().encode()
    header = {"format": "cmf", "version": 2, "arch": {"vocab_size": vocab_size}, "quant_type": "F32"}
    one = [("model.norm.weight", DType.F32, (4,), lambda: np.ones(4, np.float32))]
    create_model(path, header=header, tensors=one, vocab=vocab)
    return path
