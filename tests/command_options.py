"""Every option of every command, as the programs have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from cortiq_fcd.cli.commands import app

OF_THE_LIBRARY = {"help", "install_completion", "show_completion"}


def options() -> Iterator[tuple[str, Any]]:
    """Name of the command ("" for the program's own) and the option."""
    program = typer.main.get_command(app)
    commands: dict[str, Any] = {"": program, **program.commands}  # type: ignore[attr-defined]
    for name, command in commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in OF_THE_LIBRARY:
                yield name, parameter


def flags() -> set[str]:
    """Every flag of every command."""
    return {flag for _, option in options() for flag in (*option.opts, *option.secondary_opts)}
