"""A report on a terminal: the outcome first, then the numbers, the gate, the curves, and how it was made."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.curve import chart, sparkline
from cortiq_fcd.display.repetition_view import of_report, repetition_table
from cortiq_fcd.stages.report import GateInfo, LossRecord, Report
from cortiq_fcd.stages.sentence import sentence

CHART_ROWS = 6
CHART_COLUMNS = 60
GATE_ROWS = 16


def show_report(report: Report, console: Console) -> None:
    """The whole report, fit for 80 columns."""
    console.print(Text(figures.printable(sentence(report)), style="bold"))
    _section(console, "Perplexity (lower is better)", perplexity_table(report))
    _section(console, "Generation gate", gate_table(report.gate))
    _gate_words(report.gate, console)
    repetition = repetition_table(of_report(report.gate))
    if repetition.row_count:
        _section(console, "How much the texts repeat (rep-n: share of repeated n-grams)", repetition)
    _curves(report, console)
    _section(console, "How it was made", facts_table(report_facts(report)))
    for message in report.warnings:
        console.print(Text(figures.printable(f"! {message}"), style="yellow"))


def show_record(record: dict[str, Any], console: Console) -> None:
    """`provenance.fcd` of a file that has no report beside it, as it stands."""
    _section(console, "provenance.fcd", facts_table([(key, _plain(value)) for key, value in record.items()]))


def perplexity_table(report: Report) -> Table:
    """One row a set of tokens: only numbers in the same row can be compared."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("over")
    for name in ("exact", "start", "OUT", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    ppl, kl = report.ppl, report.kl_served
    for name, row in (("served positions", ppl.served), ("final windows", ppl.final_windows)):
        table.add_row(
            name, *map(figures.perplexity, (row.teacher, row.start, row.final)), _change(row.start, row.final)
        )
    quick = (ppl.teacher, ppl.start, ppl.best)
    table.add_row("quick windows (these chose)", *map(figures.perplexity, quick), _change(ppl.start, ppl.best))
    table.add_row("windows that chose nothing", "", "", figures.perplexity(ppl.untouched), "")
    nats = (figures.nats(kl.start), figures.nats(kl.final), _change(kl.start, kl.final))
    table.add_row("KL to exact, served (nats)", "", *nats)
    return table


def gate_table(gate: GateInfo) -> Table:
    """The loop scores: before, with exact attention, and of the checkpoints, the chosen one marked."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("checkpoint", "quick ppl", "loop scores", "verdict"):
        table.add_column(name, no_wrap=True)
    if gate.teacher is not None:
        table.add_row("exact attention", "", figures.scores(gate.teacher), "")
    if gate.baseline is not None and all(entry.step for entry in gate.evals):
        table.add_row("step 0 (before)", "", figures.scores(gate.baseline), "")
    for entry in gate.evals[-GATE_ROWS:]:
        mark = " *" if entry.step == gate.chosen else ""
        verdict = {True: "passed", False: "failed", None: "not decoded: couldn't win"}[entry.passed]
        cells = (figures.perplexity(entry.ppl), figures.scores(entry.scores), f"{verdict}{mark}")
        table.add_row(f"step {entry.step}" if entry.step else "step 0 (before)", *cells)
    return table


def report_facts(report: Report) -> list[tuple[str, str]]:
    """What was trained on what, where it went, and what it took."""
    o1, recipe, corpus, out = report.o1, report.recipe, report.corpus, report.output
    share = f"{figures.count(report.trainable_params)} of {figures.count(report.source.params)} weights"
    saved = f", trained tensors as {out.save_dtype}" if out.save_dtype else ""
    kernel = f"{o1.m} landmarks, window {o1.w}, sink {o1.sink}, seal at {o1.prefill}"
    if recipe.polish_only:
        kernel = "attention stayed exact (--polish-only)"
    facts = [
        ("trained", f"{share}, layers {figures.layers(report.converted_layers)}"),
        ("kernel", kernel),
        (
            "recipe",
            f"{report.steps_run} of {recipe.steps} steps, {recipe.batch} x {recipe.seq} tokens, lr {recipe.lr:g}, "
            f"kl {recipe.kl:g}, seed {recipe.seed}",
        ),
        ("text", f"{corpus.source}: {corpus.train_tokens:,} tokens to train on, {corpus.val_tokens:,} to validate"),
        ("source", f"{report.source.path} ({figures.size(report.source.bytes)}, hash {report.source.dir_hash})"),
        ("output", f"{out.path} ({figures.size(out.bytes)}, hash {out.dir_hash}{saved})"),
        ("tensors", f"{out.tensors_written} written, {out.tensors_copied} copied byte for byte"),
        ("time", ", ".join(f"{stage} {figures.duration(s)}" for stage, s in report.timing.items()) or "-"),
        ("tool", f"{report.tool.name} {report.tool.version}, torch {report.tool.torch}, {_machine(report)}"),
        ("created", report.created),
    ]
    if recipe.teacher is not None:
        facts.insert(3, ("teacher", recipe.teacher))
    if (peak := report.memory.peak_rss_bytes) is not None:
        facts.insert(-2, ("memory", f"peak {figures.size(peak)}"))
    return facts


def facts_table(facts: list[tuple[str, str]]) -> Table:
    """Names at the left, values at the right, long values folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(figures.printable(name)), Text(figures.printable(value)))
    return table


def _section(console: Console, title: str, body: Table) -> None:
    console.print()
    console.print(Text(title, style="bold cyan"))
    if body.row_count:
        console.print(Padding(body, (0, 0, 0, 2)))


def _gate_words(gate: GateInfo, console: Console) -> None:
    if gate.status == "skipped":
        words = f"skipped: {gate.reason}"
    else:
        words = f"a prompt passes at {gate.threshold:.2f} or less, and at most {gate.slack:.2f} above its score before"
        words += f", in steps of {gate.granularity:.3f}" if gate.granularity is not None else ""
        words += "; strict: a text that ends in a tight loop fails" if gate.profile == "strict" else ""
        words += "; * = chosen" if gate.chosen is not None else "; nothing was chosen"
    console.print(Padding(Text(figures.printable(words), style="dim"), (0, 0, 0, 2)))


def _curves(report: Report, console: Console) -> None:
    if not report.losses or not console.encoding.lower().startswith("utf"):
        return
    console.print()
    console.print(Text(f"Training, steps 1 to {report.losses[-1].step}", style="bold cyan"))
    for name, field in (("ce", "ce"), ("kl", "kl"), ("gradient", "grad_norm")):
        console.print(Text(_spark_row(name, _series(report.losses, field)), no_wrap=True, overflow="ellipsis"))
    points = [entry.ppl for entry in report.evals if entry.ppl is not None]
    if len(points) > 1:
        console.print()
        title = f"Quick-window perplexity at {len(points)} validations"
        console.print(Text(title, style="bold cyan"))
        width = max(1, CHART_COLUMNS // len(points))
        wide = [value for value in points for _ in range(width)]
        for line in chart(wide, CHART_COLUMNS, CHART_ROWS):
            console.print(Text(f"  {line}", no_wrap=True, overflow="ellipsis"))


def _series(losses: list[LossRecord], field: str) -> list[float]:
    values: list[float | None] = [getattr(entry, field) for entry in losses]
    return [value for value in values if value is not None]


def _spark_row(name: str, values: list[float]) -> str:
    if not values:
        return f"  {name:<9} -"
    return f"  {name:<9} {values[0]:>8.4g}  {sparkline(values, 40):<40}  {values[-1]:.4g}"


def _machine(report: Report) -> str:
    return f"{report.tool.device} {report.tool.precision}, {report.tool.threads} threads"


def _change(start: float | None, final: float | None) -> str:
    return figures.change(start, final)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        return figures.layers(value) if whole else " ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
