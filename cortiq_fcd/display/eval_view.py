"""What `eval` found out, on a terminal: the outcome in a sentence, then the numbers."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.report_rows import machine
from cortiq_fcd.display.report_view import facts_table
from cortiq_fcd.stages.readings import EvalReport


def show_eval(found: EvalReport, console: Console) -> None:
    """All of it, fit for 80 columns."""
    console.print(Text(figures.printable(eval_sentence(found)), style="bold"))
    console.print()
    console.print(Padding(eval_table(found), (0, 0, 0, 2)))
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
    table.add_row("exact", figures.perplexity(found.exact.ppl), "", "", f"{found.exact.tokens_per_s:.0f}")
    if found.served is not None:
        ratio = "-" if found.ratio is None else f"{found.ratio:.3f}"
        cells = (figures.perplexity(found.served.ppl), ratio, figures.nats(found.kl))
        table.add_row("served O(1)", *cells, f"{found.served.tokens_per_s:.0f}")
    return table


def _facts(found: EvalReport) -> list[tuple[str, str]]:
    windows, o1 = found.windows, found.o1
    kernel = "exact attention alone"
    if o1 is not None:
        layers = o1.layers if isinstance(o1.layers, str) else figures.layers(o1.layers)
        kernel = f"layers {layers}, {o1.m} landmarks, window {o1.w}, sink {o1.sink}"
    spread = f"{figures.counted(windows.count, 'window')} of {windows.seq} tokens, the prompt part {windows.prefill}"
    seconds = found.exact.seconds + (found.served.seconds if found.served else 0.0)
    return [
        ("file", f"{found.file.path} ({figures.size(found.file.bytes)}, hash {found.file.dir_hash})"),
        ("kernel", kernel),
        ("text", f"{found.text.source} ({found.text.tokens:,} tokens)"),
        ("measured", f"{windows.positions:,} tokens: {spread}"),
        ("time", f"{figures.duration(seconds)} on {machine(found.tool)}"),
    ]
