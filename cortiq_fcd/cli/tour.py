"""`cortiq-fcd demo`: the built-in model polished in a folder, with words for people who have never seen a polish."""

from __future__ import annotations

import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cortiq_fcd.cli.settings import resolve
from cortiq_fcd.display.guard import Guarded
from cortiq_fcd.display.report_view import show_report
from cortiq_fcd.errors import ConfigError
from cortiq_fcd.stages.report import Report

MODEL, SETTINGS, POLISHED = "demo.cmf", "demo.toml", "polished.cmf"

INTRODUCTION = """\
{folder}/{model} is a small language model that learned English from Jane Austen's novels.

Attention normally looks at every earlier token, so each new token costs more than the one before. The O(1) kernel keeps
a short window and a few landmarks instead: every token costs the same. The weights stay as they were, so the model gets
worse, and may start to repeat itself. Polishing trains the converted layers until that damage is repaired as far as it
can be. On two cores this takes a minute or two. It is the same as:

    cortiq-fcd polish {folder}/{model} {folder}/{polished} --config {folder}/{settings} --force
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
    "rejected": "The gate rejected every checkpoint: a model this small loops whatever its perplexity is (it can loop "
    "with exact attention too). What is written is then the conversion as it was, never something that only looks "
    "better: {folder}/{polished} holds the weights of {folder}/{model}.",
    "nothing better": "No checkpoint beat the conversion as it was, so {folder}/{polished} holds the weights of "
    "{folder}/{model}.",
    "skipped": "The gate did not run, so perplexity alone chose.",
}

WHAT_NEXT = """\
Both files are there to look at:

    cortiq-fcd inspect {folder}/{polished}
    cortiq-fcd verify {folder}/{polished}
    cortiq-fcd report {folder}/{polished}
"""


def run_tour(folder: Path, listener: Guarded) -> None:
    """Copy the model, polish it, show and explain the report."""
    console = Console(file=sys.stdout, highlight=False)
    names = {"folder": str(folder), "model": MODEL, "settings": SETTINGS, "polished": POLISHED}
    _copy_demo(folder)
    _say(console, INTRODUCTION.format(**names))
    settings = resolve({"output.force": True}, folder / SETTINGS)
    from cortiq_fcd.stages import pipeline  # imports torch: not before it is needed

    with listener:
        report = pipeline.run(folder / MODEL, folder / POLISHED, settings, listener)
    show_report(report, console)
    _say(console, "\n" + EXPLANATION.format(verdict=VERDICTS[verdict_of(report)].format(**names), **names))
    _say(console, WHAT_NEXT.format(**names))


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
            target = folder / name
            if target.exists() and target.read_bytes() != built_in.read_bytes():
                raise ConfigError(f"{target} is there and is not the demo's", hint="choose another folder: demo DIR")
            shutil.copyfile(built_in, target)


def _say(console: Console, text: str) -> None:
    """Print text whose paragraphs are broken by hand, joined so that any terminal width suits; indented lines stay."""
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith("    "):
            console.print(Text(paragraph, style="cyan"), soft_wrap=True)
        else:
            console.print(Text(" ".join(paragraph.split())))
        console.print()
