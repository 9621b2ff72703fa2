"""`cortiq-fcd demo`: the built-in model polished in a folder, with words for people who have never seen a polish."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cortiq_fcd.cli.pasting import command_lines, program
from cortiq_fcd.cli.paths import check_name
from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.cli.settings import Flags
from cortiq_fcd.display.figures import printable
from cortiq_fcd.display.guard import Guarded
from cortiq_fcd.display.report_view import perplexity_table, show_report
from cortiq_fcd.display.results import result_console
from cortiq_fcd.errors import ConfigError
from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.stages.interrupt import Interruption
from cortiq_fcd.stages.report import Report
from cortiq_fcd.stages.sentence import sentence

MODEL, SETTINGS, POLISHED, UNGATED = "demo.cmf", "demo.toml", "polished.cmf", "ungated.cmf"

INTRODUCTION = """\
{folder}/{model} is a small language model that learned English from Jane Austen's novels.

Attention normally looks at every earlier token, so each new token costs more than the one before. The O(1) kernel keeps
a short window and a few landmarks instead: every token costs the same. The weights stay as they were, so the model gets
worse, and may start to repeat itself. Polishing trains the converted layers until that damage is repaired as far as it
can be. It is the same as:

    {command} polish {folder}/{model} {folder}/{polished} --config {folder}/{settings} --force
"""

EXPLANATION = """\
How to read this. Perplexity says how surprised the model is by text that it has not seen: lower is better. "exact" is
the model with ordinary attention, "start" the same weights with the O(1) kernel, "OUT" the file that was written. Only
numbers in one row can be compared. KL says how far the O(1) model's predictions are from the exact model's: it falls
when the damage is mended, and not when the model merely learns the text. A loop score is the share of repeated 4-token
pieces in generated text: 0 is none, 1 is nothing else. {verdict}
"""

VERDICTS = {
    "chosen": "The gate passed the checkpoint that was written.",
    "rejected": "The gate rejected every checkpoint, because their text repeats itself more than it allows. So what "
    "was written is the conversion as it was, and {folder}/{polished} holds the weights of {folder}/{model}.",
    "nothing better": "No checkpoint beat the conversion as it was, so {folder}/{polished} holds the weights of "
    "{folder}/{model}.",
    "skipped": "The gate did not run, so perplexity alone chose.",
}

WITHOUT_GATE = """\
To see what was rejected, the same training again, now with perplexity alone choosing. It is the same as:

    {command} polish {folder}/{model} {folder}/{ungated} --config {folder}/{settings} --no-gate --force
"""

BOTH_FILES = """\
{folder}/{ungated} holds what perplexity alone chose, {folder}/{polished} what passed the gate.
"""

WHAT_NEXT = """\
Look at the files:

    {command} inspect {folder}/{polished}
    {command} verify {folder}/{polished}
    {command} report {folder}/{polished}

The same report as a page for a browser, with the curves and all texts side by side:

    {command} report {folder}/{polished} --html {folder}/report.html
"""

NewListener = Callable[[], Guarded]


def run_tour(folder: Path, new_listener: NewListener) -> None:
    """Copy the model, polish it, show and explain the report; if the gate rejected everything, show what it was."""
    console = result_console()
    names = {"command": program(), "folder": printable(str(folder)), "model": MODEL, "settings": SETTINGS}
    names |= {"polished": POLISHED, "ungated": UNGATED}
    check_name(folder, str(folder))
    _copy_demo(folder)
    _say(console, INTRODUCTION, names)
    report = _polish(folder, POLISHED, {}, new_listener)
    show_report(report, console)
    verdict = verdict_of(report)
    console.print()
    _say(console, EXPLANATION, {**names, "verdict": VERDICTS[verdict].format(**names)})
    if verdict == "rejected":
        _say(console, WITHOUT_GATE, names)
        ungated = _polish(folder, UNGATED, {"gate.enabled": False}, new_listener)
        console.print(Text(printable(sentence(ungated)), style="bold"), perplexity_table(ungated), sep="\n\n")
        console.print()
        _say(console, BOTH_FILES, names)
    _say(console, WHAT_NEXT, names)


def _polish(folder: Path, out: str, flags: Flags, new_listener: NewListener) -> Report:
    settings = resolve({**flags, "output.force": True}, folder / SETTINGS)
    listener = new_listener()
    with Interruption(listener.stopping).handling() as interruption, listener:
        from cortiq_fcd.stages import pipeline  # takes seconds

        return pipeline.run(folder / MODEL, folder / out, settings, listener, interruption)


def verdict_of(report: Report) -> str:
    """Which of VERDICTS explains this report."""
    if report.gate.status == "skipped":
        return "skipped"
    if report.outcome == "polished":
        return "chosen"
    judged = [entry for entry in report.gate.evals if entry.step > 0 and entry.passed is not None]
    return "rejected" if judged and not any(entry.passed for entry in judged) else "nothing better"


def _copy_demo(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, SETTINGS):
        with as_file(files("cortiq_fcd") / "data" / name) as built_in:
            target, data = folder / name, built_in.read_bytes()
            if target.exists() and target.read_bytes() != data:
                raise ConfigError(f"{target} is there and is not the demo's", hint="choose another folder: demo DIR")
            write_atomically(target, lambda file, data=data: file.write(data))  # type: ignore[misc]


def _say(console: Console, text: str, names: dict[str, str]) -> None:
    """Print paragraphs, filled in and broken where the terminal ends; indented ones as they are, to be pasted."""
    for paragraph in text.format(**names).strip("\n").split("\n\n"):
        if paragraph.startswith("    "):
            columns = console.width if console.is_terminal else None
            for line in paragraph.split("\n"):
                for part in command_lines(shlex.split(line), columns, "    "):
                    console.print(Text(part, style="cyan"), soft_wrap=True)
        else:
            console.print(Text(" ".join(paragraph.split())))
        console.print()
