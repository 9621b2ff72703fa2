"""`--progress json`: one event a line (schemas/event.schema.json), for programs that show their own bar."""

from __future__ import annotations

from typing import TextIO

from cortiq_fcd.display.figures import printable_json
from cortiq_fcd.events import Event


class JsonLines:
    """Writes every event as one line of strict JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        """Write one line. Numbers that are not finite become null: JSON has no other word for them."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(printable_json(event.model_dump_json(), encoding) + "\n")
        self._stream.flush()

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""
