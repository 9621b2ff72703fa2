"""The command line: parse, configure, run, exit code. Heavy modules are imported inside the commands that need them."""

from cortiq_fcd.cli.exits import main

__all__ = ["main"]
