"""Every option of every command says its unit and its default, in words that fit the value."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from cortiq_fcd.cli.commands import app
from cortiq_fcd.cli.settings import SETTINGS
from tests.command_options import options

OPTIONS = list(options())
# What a number counts or measures. A share says its range; a seed and a learning rate have no unit.
UNITS = (
    r"\b(tokens|bytes|steps|windows|landmarks|minutes|threads|GB|ranks|nats|0 to 1|seed|learning rate|temperature|"
    r"weight|times)\b"
)


def identify(value: Any) -> str:
    return value if isinstance(value, str) else value.opts[0]


def test_the_walk_sees_every_command() -> None:
    names = {name for name, _ in OPTIONS}
    assert names >= {"", "polish", "eval", "gate", "convert", "config", "export", "report", "inspect", "demo"}
    assert len(OPTIONS) > 100


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=identify)
def test_it_says_its_default(command: str, option: Any) -> None:
    assert option.help, "no help at all"
    assert re.search(r"default: \S", option.help), option.help


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=identify)
def test_it_is_shown_as_it_is_written(command: str, option: Any) -> None:
    """The help is drawn from markup, where [a bracket] that is not escaped vanishes."""
    shown = Text.from_markup(option.help).plain
    assert shown == option.help.replace("\\[", "[")


def test_no_bracket_is_lost_on_the_way_to_the_screen() -> None:
    """Of the settings' own texts; lines are broken anywhere."""
    shown = CliRunner().invoke(app, ["polish", "--help"]).output
    shown = re.sub(r"[\s│|]", "", re.sub(r"\x1b\[[0-9;]*m", "", shown))
    texts = [found for setting in SETTINGS for found in re.findall(r"\S*\[\S*\]", setting.help)]
    assert "cortiq-fcd[tensorboard]" in texts
    assert [text for text in texts if text not in shown] == []


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=identify)
def test_a_number_says_its_unit(command: str, option: Any) -> None:
    if option.metavar in ("N", "X"):
        assert re.search(UNITS, option.help, re.IGNORECASE), f"{option.help}: no unit"


def test_the_numbers_are_the_ones_called_n_and_x() -> None:
    for setting in SETTINGS:
        assert (setting.metavar in ("N", "X")) == (setting.kind in (int, float)), setting.flag


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=identify)
def test_a_default_is_the_one_that_is_said(command: str, option: Any) -> None:
    """Where the command itself holds it; those of a polish's settings are held against the models in test_cli."""
    said = option.help.rsplit("default: ", 1)[-1]
    if isinstance(option.default, bool):
        assert said == ("on" if option.default else "off")
    elif option.default is not None and not callable(option.default):
        assert said == str(option.default)
