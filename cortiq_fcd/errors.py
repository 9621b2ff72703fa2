"""Every error that a user can meet: what was wrong, where, what to do next, and the exit code it ends with.

Anything else that escapes is a bug and shows a traceback (exit code 1).
"""

from __future__ import annotations

import os
from typing import ClassVar

_DAMAGED = "the file is damaged or not whole: copy, download or convert it again"


class CortiqError(Exception):
    """Base of all expected errors. `message` is one plain paragraph, `hint` says what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(CortiqError):
    """A flag, a combination of flags, or a path that can't work. Exit 2."""

    exit_code = 2


class CmfFormatError(CortiqError):
    """The file is not a valid CMF container. Exit 3.

    `what` names the rule that is broken; `tensor` and `offset_bytes` (from the start of the file) say where.
    """

    exit_code = 3

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str,
        *,
        tensor: str | None = None,
        offset_bytes: int | None = None,
        expected: object = None,
        got: object = None,
        hint: str = "",
    ) -> None:
        where = os.fspath(path)
        if tensor is not None:
            where += f": tensor {tensor!r}"
        if offset_bytes is not None:
            where += f" at byte {offset_bytes}"
        detail = ""
        if expected is not None or got is not None:
            detail = f": expected {expected}, got {got}"
        super().__init__(f"{where}: {what}{detail}", hint=hint or _DAMAGED)
        self.path = os.fspath(path)
        self.what = what
        self.tensor = tensor
        self.offset_bytes = offset_bytes
        self.expected = expected
        self.got = got


class NonFiniteWeightsError(CmfFormatError):
    """A source tensor holds NaN or Inf. Exit 3."""


class UnsupportedModelError(CortiqError):
    """The file is valid, but the model needs something that is not implemented. Exit 4. `subject` names what."""

    exit_code = 4

    def __init__(self, subject: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"{subject}: {why}", hint=hint)
        self.subject = subject
        self.why = why


class CorpusError(CortiqError):
    """The text or the ids can't be used (too short, out of range, unreadable). Exit 5."""

    exit_code = 5


class TokenizerError(CorpusError):
    """No tokenizer, or one that can't be read. Exit 5."""


class ResourceError(CortiqError):
    """Out of memory, out of disk, or a place that can't be written. Exit 6."""

    exit_code = 6


class DivergedError(CortiqError):
    """Training ended in non-finite numbers. Exit 7."""

    exit_code = 7


class LostRankError(CortiqError):
    """One of several processes ended, and with it the run. Exit 8. `saved_step`: where the run can go on; null if
    nothing is saved.
    """

    exit_code = 8

    def __init__(self, message: str, *, hint: str = "", saved_step: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.saved_step = saved_step


class RankEndedError(Exception):
    """This process ends with `exit_code`, and another one has told why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class NothingPassedError(CortiqError):
    """`--require-pass` was given and no checkpoint passed the gate: nothing was written. Exit 10."""

    exit_code = 10
