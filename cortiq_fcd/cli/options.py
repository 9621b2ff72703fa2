"""Options that several commands have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortiq_fcd.errors import ConfigError

if TYPE_CHECKING:
    from cortiq_fcd.display.guard import Guarded

File = Annotated[Path, typer.Argument(metavar="FILE", help="a CMF file, or any shard of one", show_default=False)]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="the CMF file to write", show_default=False)]
Settings = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="settings as `config` prints them, flags win; default: none",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="print one JSON document on stdout; default: off", show_default=False)
]
Progress = Annotated[
    str,
    typer.Option(
        "--progress", metavar="KIND", help="auto, rich, plain, json or none; default: auto", show_default=False
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="say nothing but warnings and errors; default: off", show_default=False)
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        help="a plain line for every step, and at the end where the time went; default: off",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="tell layers, memory, disk and time; write nothing; default: off", show_default=False
    ),
]


def listener_for(progress: str, quiet: bool, verbose: bool) -> Guarded:
    """The display that --progress, -q and -v ask for; ConfigError for a kind that is not known."""
    from cortiq_fcd.display import KINDS, make_listener

    if progress not in KINDS:
        raise ConfigError(f"--progress {progress!r} is not known", hint=f"one of {', '.join(KINDS)}")
    return make_listener(progress, sys.stderr, quiet=quiet, verbose=verbose)  # type: ignore[arg-type]


def note(*texts: str, as_events: bool = False) -> None:
    """Tell notes on stderr; as warning events where a program reads along."""
    from cortiq_fcd.display.figures import printable, printable_json
    from cortiq_fcd.events import WarningEvent

    for text in texts:
        event = printable_json(WarningEvent(message=text).model_dump_json(), sys.stderr.encoding or "utf-8")
        sys.stderr.write(f"{event}\n" if as_events else f"note: {printable(text)}\n")
