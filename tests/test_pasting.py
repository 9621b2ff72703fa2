"""Commands that are shown to be pasted."""

from __future__ import annotations

import shlex

import pytest

from cortiq_fcd.cli.pasting import command_lines

WORDS = ["cortiq-fcd", "polish", "a model's.cmf", "out.cmf", "--corpus", "x" * 100, "--steps", "5", "--o1", "0,1,2"]


@pytest.mark.parametrize("columns", [20, 40, 80, 200, None])
def test_a_shell_reads_the_words_again(columns: int | None) -> None:
    lines = command_lines(WORDS, columns, "    ")
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == WORDS
    if columns is None:
        assert len(lines) == 1
    else:
        assert all(len(line) <= columns or len(line.split()) <= 3 for line in lines)


def test_control_characters_are_shown_not_obeyed() -> None:
    assert "\x1b" not in "".join(command_lines(["cortiq-fcd", "\x1b[2J"], 80, ""))
