"""The tokenizer that a model file carries: plain `tokenizer.json` bytes in the vocab section.

Ids equal HuggingFace's: same library, no special tokens added, and the truncation or padding that a tokenizer.json may
ask for switched off (transformers switches it off too; kept, it would silently shorten the corpus).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from cortiq_fcd.errors import TokenizerError
from cortiq_fcd.io.layout import VOCAB
from cortiq_fcd.io.planned import AnyModel

Ids = npt.NDArray[np.int64]

_HINT = "give the corpus as token ids (.npy or .json), or put the model's tokenizer.json beside the model file"


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `source` says where it came from, `embedded` whether that is the model file itself."""

    source: str
    embedded: bool
    sha256: str  # of the tokenizer.json bytes
    _codec: tokenizers.Tokenizer = field(repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer can produce, added tokens included."""
        return int(self._codec.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Ids:
        """Token ids [N] of the text, without beginning-of-text or other tokens that are not in it."""
        return np.asarray(self._codec.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = False) -> str:
        """The text of ids [N]; bytes that are no UTF-8 become U+FFFD."""
        return str(self._codec.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens))


def load_tokenizer(model: AnyModel) -> Tokenizer:
    """The embedded tokenizer; where the file has none, the `tokenizer.json` beside it.

    Raises TokenizerError when there is neither, or when the one found can't be read.
    """
    embedded = model.section(VOCAB)
    if embedded:
        return _parse(embedded, f"{model.path}: vocab section", embedded=True)
    beside = Path(model.path).parent / "tokenizer.json"
    if not beside.is_file():
        raise TokenizerError(
            f"{model.path}: no tokenizer: expected a vocab section in the file or {beside}, got neither", hint=_HINT
        )
    try:
        data = beside.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{beside}: can't be read: {error.strerror}", hint=_HINT) from error
    return _parse(data, str(beside), embedded=False)


def _parse(data: bytes, source: str, *, embedded: bool) -> Tokenizer:
    try:
        json.loads(data)  # first, since its message says where, and the library's does not
        codec = tokenizers.Tokenizer.from_buffer(data)
    # The library raises bare Exception for what it does not understand.
    except Exception as error:
        raise TokenizerError(
            f"{source}: not a tokenizer: expected a HuggingFace tokenizer.json, got {len(data)} bytes that fail with:"
            f" {error}",
            hint=_HINT,
        ) from error
    codec.no_truncation()
    codec.no_padding()
    return Tokenizer(source=source, embedded=embedded, sha256=hashlib.sha256(data).hexdigest(), _codec=codec)
