"""What `eval` found out, on a terminal: the outcome in a sentence, then the numbers."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.report_rows import machine
from cortiq_fcd.display.report_view import facts_table
from cortiq_fcd.stages.readings import EvalReport, SweepRow
from cortiq_fcd.stages.report import O1Info


def show_eval(found: EvalReport, console: Console) -> None:
    """All of it, fit for 80 columns."""
    console.print(Text(figures.printable(eval_sentence(found)), style="bold"))
    console.print()
    console.print(Padding(eval_table(found), (0, 0, 0, 2)))
    console.print()
    if found.sweep:
        console.print(Padding(sweep_table(found.sweep), (0, 0, 0, 2)))
        console.print()
        for line in sweep_advice(found.sweep, found.o1):
            console.print(Text(line))
        console.print()
    console.print(Padding(facts_table(_facts(found)), (0, 0, 0, 2)))
    for message in found.warnings:
        console.print(Text(figures.printable(f"! {message}"), style="yellow"))


def eval_sentence(found: EvalReport) -> str:
    """The outcome in one plain sentence."""
    exact = figures.perplexity(found.exact.ppl)
    if found.served is None or found.ratio is None:
        return f"Perplexity {exact} with exact attention; {found.reason}."
    served = figures.perplexity(found.served.ppl)
    return f"Perplexity {served} through the O(1) kernel, {found.ratio:.3f} times that of exact attention ({exact})."


def eval_table(found: EvalReport) -> Table:
    """One row for each kind of attention."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("attention")
    for name in ("perplexity", "ratio", "KL (nats)", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("exact", figures.perplexity(found.exact.ppl), "", "", f"{found.exact.tokens_per_s:,.0f}")
    if found.served is not None:
        ratio = "-" if found.ratio is None else f"{found.ratio:.3f}"
        cells = (figures.perplexity(found.served.ppl), ratio, figures.nats(found.kl))
        table.add_row("served O(1)", *cells, f"{found.served.tokens_per_s:,.0f}")
    return table


def sweep_table(rows: list[SweepRow]) -> Table:
    """One row for each setting, in three groups: other landmarks, other windows, other sinks."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("landmarks", "window", "sinks", "perplexity", "ratio", "KL (nats)"):
        table.add_column(name, justify="right", no_wrap=True)
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row.varied != before.varied:
            table.add_row()
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        setting = ("no far field" if row.m is None else str(row.m), str(row.w), str(row.sink))
        table.add_row(*setting, figures.perplexity(row.ppl), ratio, figures.nats(row.kl))
    return table


def sweep_advice(rows: list[SweepRow], o1: O1Info | None) -> list[str]:
    """What follows for the setting: how many landmarks cost least, and whether the far field earns its place."""
    ratios = {row.m: row.ratio for row in rows if row.varied == "landmarks" and row.ratio is not None}
    without = ratios.pop(None, None)
    if o1 is None or without is None or not ratios:
        return []
    best = min(ratios, key=lambda m: (ratios[m], m or 0))
    least = ratios[best]
    lines = [f"At window {o1.w}, {best} landmarks cost least: {least:.3f} times exact."]
    if without < least:
        lines.append(f"None at all would cost {without:.3f}: the far field does not earn its place, widen the window.")
    else:
        lines.append(f"Without a far field it would be {without:.3f}.")
    return lines


def _facts(found: EvalReport) -> list[tuple[str, str]]:
    windows, o1 = found.windows, found.o1
    kernel = "exact attention alone"
    if o1 is not None:
        layers = o1.layers if isinstance(o1.layers, str) else figures.layers(o1.layers)
        kernel = f"layers {layers}, {o1.m} landmarks, window {o1.w}, sink {o1.sink}"
        if o1.costs is not None:
            kernel += f"; these layers cost least of {len(o1.costs)}"
    spread = f"{figures.counted(windows.count, 'window')} of {windows.seq} tokens, the prompt part {windows.prefill}"
    seconds = found.exact.seconds + (found.served.seconds if found.served else 0.0)
    return [
        ("file", f"{found.file.path} ({figures.size(found.file.bytes)}, hash {found.file.dir_hash})"),
        ("kernel", kernel),
        ("text", f"{found.text.source} ({found.text.tokens:,} tokens)"),
        ("measured", f"{windows.positions:,} tokens: {spread}"),
        ("time", f"{figures.duration(seconds)} on {machine(found.tool)}"),
    ]
