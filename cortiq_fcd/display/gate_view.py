"""What `gate` found out, on a terminal: the verdict, the scores, and what was said."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.repetition_view import repetition_table
from cortiq_fcd.display.report_rows import machine
from cortiq_fcd.display.report_view import facts_table
from cortiq_fcd.stages.readings import GateReport, PromptVerdict
from cortiq_fcd.stages.report import Continuation


def show_gate(found: GateReport, console: Console) -> None:
    """All of it, fit for 80 columns."""
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[found.passed]
    console.print(Text(figures.printable(gate_sentence(found)), style=style))
    if found.scores is not None:
        _section(console, "Loop scores (0: nothing repeats, 1: nothing else)", score_table(found))
        rows = [("exact attention", found.exact_repetition), ("before", found.before_repetition)]
        table = repetition_table([*rows, ("FILE", found.repetition)])
        _section(console, "How much the texts repeat (rep-n: share of repeated n-grams)", table)
        for number, prompt in enumerate(found.prompts, 1):
            _texts(console, number, prompt)
    console.print()
    console.print(Padding(facts_table(_facts(found)), (0, 0, 0, 2)))
    for message in found.warnings:
        console.print(Text(figures.printable(f"! {message}"), style="yellow"))


def gate_sentence(found: GateReport) -> str:
    """The verdict in one plain sentence."""
    if found.scores is None:
        return f"Not judged: {found.reason}."
    through = "exact attention" if found.o1 is None else "the served O(1) kernel"
    failed = sum(not prompt.passed for prompt in found.prompts)
    if not failed:
        return f"Passed: through {through} no text repeats itself too much (worst loop score {max(found.scores):.2f})."
    worst = f"worst loop score {max(found.scores):.2f}"
    loops = figures.tight_loops(found.tight_loops or 0)
    return (
        f"Failed: through {through} {failed} of {len(found.prompts)} texts repeat themselves too much ({worst}{loops})."
    )


def score_table(found: GateReport) -> Table:
    """One row a prompt."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("prompt", justify="right")
    named = [("exact", found.exact), ("before", found.baseline), ("FILE", found.scores)]
    columns = [(name, scores) for name, scores in named if scores is not None]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tight loop", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    periods = [text.tight_loop for text in found.repetition.texts] if found.repetition else []
    for number, prompt in enumerate(found.prompts):
        period = periods[number]
        scores = [f"{scores[number]:.2f}" for _, scores in columns]
        loop = "-" if period is None else f"{period} tokens"
        table.add_row(str(number + 1), *scores, loop, "passed" if prompt.passed else "failed")
    return table


def _texts(console: Console, number: int, prompt: PromptVerdict) -> None:
    """The end of a prompt, and what follows it; repeated pieces are marked."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("prompt ends", Text(_line(figures.prompt_end(prompt.prompt)), style="dim"))
    for name, said in (("exact", prompt.exact), ("before", prompt.before), ("FILE", prompt.text)):
        if said is not None:
            table.add_row(name, _marked(said))
    _section(console, f"Prompt {number}, token {prompt.offset:,} of the text", table)


def _marked(said: Continuation) -> Text:
    """A text on one line, with what it had said before in red."""
    pieces, at = Text(), 0
    for start, stop in said.repeats:
        pieces.append(_line(said.text[at:start]))
        pieces.append(_line(said.text[start:stop]), style="red")
        at = stop
    pieces.append(_line(said.text[at:]))
    return pieces[len(pieces.plain) - len(pieces.plain.lstrip()) :]


def _line(text: str) -> str:
    return figures.printable(text.replace("\n", " "))


def _facts(found: GateReport) -> list[tuple[str, str]]:
    rule = f"at most {found.threshold:.2f}"
    rule += f", and at most {found.slack:.2f} above the score before" if found.before is not None else ""
    rule += ", and no tight loop" if found.profile == "strict" else ""
    facts = [("file", f"{found.file.path} (hash {found.file.dir_hash})")]
    if found.before is not None:
        facts.append(("before", f"{found.before.path} (hash {found.before.dir_hash})"))
    lengths = f"{found.prompt_tokens} tokens each, continued for {found.new_tokens}"
    return [
        *facts,
        ("text", f"{found.text.source} ({found.text.tokens:,} tokens)"),
        ("profile", f"{found.profile}: {len(found.prompts) or 'no'} prompts, {lengths}"),
        ("passes", f"{rule}; scores move in steps of {found.granularity:.3f}"),
        ("machine", machine(found.tool)),
    ]


def _section(console: Console, title: str, body: Table) -> None:
    console.print()
    console.print(Text(title, style="bold cyan"))
    console.print(Padding(body, (0, 0, 0, 2)))
