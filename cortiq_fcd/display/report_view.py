"""A report on a terminal: the outcome first, then the numbers, the gate, the curves, and how it was made."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import line_chart, sparkline
from cortiq_fcd.display.repetition_view import of_report, repetition_table
from cortiq_fcd.display.report_rows import (
    PERPLEXITY_COLUMNS,
    TimeRow,
    gate_rows,
    gate_words,
    perplexity_rows,
    report_facts,
    time_rows,
)
from cortiq_fcd.stages.report import Continuation, GateInfo, LossRecord, Report
from cortiq_fcd.stages.sentence import sentence

GATE_ROWS = 16
TEXTS_SHOWN = 3
NOISE = "single steps are noisy, as each sees other text: whether it learns, validation tells"
BAR_COLUMNS = 24


def show_report(report: Report, console: Console) -> None:
    """The whole report, fit for 80 columns."""
    console.print(Text(figures.excerpt(sentence(report)), style="bold"))
    _section(console, "Perplexity (lower is better)", perplexity_table(report))
    _section(console, "Generation gate", gate_table(report.gate))
    rule = figures.excerpt(gate_words(report.gate)) + ("; * = chosen" if report.gate.chosen is not None else "")
    console.print(Padding(Text(rule, style="dim"), (0, 0, 0, 2)))
    repetition = repetition_table(of_report(report.gate))
    if repetition.row_count:
        _section(console, "How much the texts repeat (rep-n: share of repeated n-grams)", repetition)
    _texts(report.gate, console)
    _curves(report, console)
    if report.timing:
        _section(console, "Where time went", time_table(time_rows(report.timing), _is_unicode(console)))
    _section(console, "How it was made", facts_table(report_facts(report)))
    for message in report.warnings:
        console.print(Text(figures.excerpt(f"! {message}"), style="yellow"))


def show_record(record: dict[str, Any], console: Console) -> None:
    """`provenance.fcd` of a file that has no report beside it, as it stands."""
    _section(console, "provenance.fcd", facts_table([(key, _plain(value)) for key, value in record.items()]))


def perplexity_table(report: Report) -> Table:
    """One row a set of tokens: only numbers in the same row can be compared."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("over")
    for name in PERPLEXITY_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in perplexity_rows(report):
        table.add_row(*row)
    return table


def gate_table(gate: GateInfo) -> Table:
    """The loop scores: before, with exact attention, and of the last checkpoints, the chosen one marked."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("checkpoint", "quick ppl", "loop scores", "verdict"):
        table.add_column(name, no_wrap=True)
    rows = gate_rows(gate)
    before = [row for row in rows if not row.verdict]
    for row in before + [row for row in rows if row.verdict][-GATE_ROWS:]:
        table.add_row(row.name, row.ppl, row.scores, row.verdict + (" *" if row.chosen else ""))
    return table


def time_table(rows: list[TimeRow], is_unicode: bool) -> Table:
    """Seconds of every stage and its phases, with a bar where the terminal has blocks."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for row in rows:
        bar = "█" * round(row.share * BAR_COLUMNS) if is_unicode else ""
        style = "dim" if row.depth else ""
        name = Text("  " * row.depth + figures.excerpt(row.name), style=style)
        table.add_row(name, figures.duration(row.seconds), f"{100 * row.share:.0f} %", Text(bar, style=style or "cyan"))
    return table


def facts_table(facts: list[tuple[str, str]]) -> Table:
    """Names at the left, values at the right, long values folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(figures.excerpt(name)), Text(figures.excerpt(value)))
    return table


def _section(console: Console, title: str, body: Table) -> None:
    console.print()
    console.print(Text(title, style="bold cyan"))
    if body.row_count:
        console.print(Padding(body, (0, 0, 0, 2)))


def _texts(gate: GateInfo, console: Console) -> None:
    """What was said before and after; what had been said before is marked."""
    if gate.texts is None:
        return
    after = f"step {gate.texts.step}{' *' if gate.texts.step == gate.chosen else ''}"
    console.print()
    console.print(Text("What it says (repeated 4-grams are [marked])", style="bold cyan"))
    for prompt in gate.texts.prompts[:TEXTS_SHOWN]:
        said = (("prompt", prompt.prompt), ("exact", prompt.teacher), ("before", prompt.start), (after, prompt.after))
        facts = [(name, text) for name, text in said if text is not None]
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in facts:
            shown = Text(_one_line(figures.prompt_end(text)), style="dim") if isinstance(text, str) else marked(text)
            table.add_row(name, shown)
        console.print(Padding(table, (0, 0, 1, 2)))
    if len(gate.texts.prompts) > TEXTS_SHOWN:
        rest = len(gate.texts.prompts) - TEXTS_SHOWN
        console.print(Padding(Text(f"{rest} more prompts are in --html and --json", style="dim"), (0, 0, 0, 2)))


def marked(said: Continuation) -> Text:
    """A continuation on one line; brackets and colour around what repeats."""
    text, at = Text(), 0
    for start, stop in said.repeats:
        text.append(_one_line(said.text[at:start]))
        text.append(f"[{_one_line(said.text[start:stop])}]", style="yellow")
        at = stop
    text.append(_one_line(said.text[at:]))
    return text[len(text.plain) - len(text.plain.lstrip()) :]


def _one_line(text: str) -> str:
    return figures.excerpt(" ".join(text.split("\n")))


def _curves(report: Report, console: Console) -> None:
    if not report.losses or not _is_unicode(console):
        return
    console.print()
    console.print(Text(f"Training, steps 1 to {report.losses[-1].step}", style="bold cyan"))
    console.print(Text(f"  {NOISE}", style="dim"))
    for name, field in (("ce", "ce"), ("kl", "kl"), ("gradient", "grad_norm")):
        console.print(Text(_spark_row(name, _series(report.losses, field)), no_wrap=True, overflow="ellipsis"))
    for title, points in (
        ("Cross entropy, nats, over steps", [(e.step, e.ce) for e in report.losses]),
        ("Quick-window perplexity over steps", [(e.step, e.ppl) for e in report.evals]),
    ):
        lines = line_chart(points, console.width - 4)
        if lines:
            console.print()
            console.print(Text(title, style="bold cyan"))
        for line in lines:
            console.print(Text(f"  {line}", no_wrap=True, overflow="ellipsis"))


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _series(losses: list[LossRecord], field: str) -> list[float]:
    values: list[float | None] = [getattr(entry, field) for entry in losses]
    return [value for value in values if value is not None]


def _spark_row(name: str, values: list[float]) -> str:
    if not values:
        return f"  {name:<9} -"
    return f"  {name:<9} {values[0]:>8.4g}  {sparkline(values, 40):<40}  {values[-1]:.4g}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        return figures.layers(value) if whole else " ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
