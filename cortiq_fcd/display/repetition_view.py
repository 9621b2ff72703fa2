"""How much generated texts repeat themselves, as a table: one row for each set of weights."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from cortiq_fcd.stages.report import GateInfo, Repetition

COLUMNS = ("rep-2", "rep-3", "rep-4", "diversity", "distinct-2", "tight loops")


def repetition_table(rows: Sequence[tuple[str, Repetition | None]]) -> Table:
    """Means over the prompts (distinct-2 is of all texts together); rows of what was not decoded are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("texts of", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, texts in rows:
        if texts is not None:
            table.add_row(name, *repetition_cells(texts))
    return table


def of_report(gate: GateInfo) -> list[tuple[str, Repetition | None]]:
    """The rows of a polish: exact attention, before, and the checkpoint that was chosen."""
    at = {entry.step: entry.repetition for entry in gate.evals}
    rows = [("exact attention", gate.teacher_repetition), ("step 0 (before)", at.get(0))]
    return rows + ([(f"step {gate.chosen} *", at.get(gate.chosen))] if gate.chosen else [])


def repetition_cells(texts: Repetition) -> list[str]:
    """One cell for each of COLUMNS."""
    count = len(texts.texts) or 1  # a damaged report may have none
    means = [
        sum(getattr(text, name) for text in texts.texts) / count for name in ("rep_2", "rep_3", "rep_4", "diversity")
    ]
    caught = sum(text.tight_loop is not None for text in texts.texts)
    distinct = "-" if texts.distinct_2 is None else f"{texts.distinct_2:.2f}"
    return [*(f"{mean:.2f}" for mean in means), distinct, f"{caught} of {len(texts.texts)}"]
