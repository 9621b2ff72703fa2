"""What is in a file, on a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortiq_fcd.display import figures
from cortiq_fcd.display.report_view import facts_table
from cortiq_fcd.stages.inspection import DtypeShare, Inspection

# Of provenance.fcd; --json has all of it.
RECORD = {
    "outcome": "polish",
    "best_step": "  chosen at step",
    "steps": "  of",
    "lr": "  lr",
    "teacher_ppl": "  exact perplexity",
    "ppl_start": "  before, quick windows",
    "ppl_final": "  after, final windows",
    "converted_layers": "  layers",
    "save_dtype": "  saved as",
}


def show_inspection(found: Inspection, console: Console) -> None:
    """The whole inspection, fit for 80 columns."""
    shards = f" in {found.shards} shards" if found.shards > 1 else ""
    console.print(Text(f"{figures.printable(found.path)}: {figures.size(found.bytes)}{shards}", style="bold"))
    _section(console, "What polish could do", facts_table(_polish_facts(found)))
    _section(console, "Recorded settings", facts_table(recorded_facts(found.o1_attn, found.fcd)))
    _section(console, "Tensors", dtype_table(found.dtypes))
    _section(console, "Sections", facts_table(_section_facts(found)))
    _section(console, "Architecture", facts_table([(k, _brief(v)) for k, v in found.arch.items()]))


def dtype_table(shares: list[DtypeShare]) -> Table:
    """One row a dtype, the largest first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("dtype")
    for name in ("tensors", "weights", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in shares:
        table.add_row(share.dtype, str(share.tensors), figures.count(share.weights), figures.size(share.bytes))
    return table


def _polish_facts(found: Inspection) -> list[tuple[str, str]]:
    possible = found.polish
    if possible is None:
        return [("not possible", found.refusal)]
    share = f"{figures.count(possible.trainable_params)} of {figures.count(possible.params)} weights"
    kernel = f"{possible.m} landmarks, window {possible.w} tokens, sink {possible.sink} tokens"
    facts = [("would convert", f"layers {figures.layers(possible.layers)}"), ("would train", share), ("kernel", kernel)]
    return facts + [("note", note) for note in possible.notes]


def recorded_facts(o1_attn: Any, record: Any) -> list[tuple[str, str]]:
    """`provenance.o1_attn` and `provenance.fcd` in short, whatever a stranger put there."""
    o1 = "no setting: the file runs exact attention" if o1_attn is None else _brief(o1_attn)
    if not isinstance(record, dict):
        fcd = "no record: the file was never polished" if record is None else _brief(record)
        return [("o1_attn", o1), ("fcd", fcd)]
    return [("o1_attn", o1), *((words, _short(record[key])) for key, words in RECORD.items() if key in record)]


def _short(value: Any) -> str:
    """A value of a record."""
    if isinstance(value, float):
        return figures.perplexity(value) if value >= 1 else f"{value:g}"
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value[:1000]):
        return _brief(figures.layers(value[:1000]))
    return _brief(value)


def _section_facts(found: Inspection) -> list[tuple[str, str]]:
    facts = [("dir_hash", found.dir_hash), ("features", f"{found.required_features:#x}")]
    facts += [(name, figures.size(size_bytes)) for name, size_bytes in found.sections.items() if size_bytes]
    return [*facts, ("header keys", ", ".join(found.header_keys))]


def _section(console: Console, title: str, body: Table) -> None:
    console.print()
    console.print(Text(title, style="bold cyan"))
    console.print(Padding(body, (0, 0, 0, 2)))


def _brief(value: Any, limit: int = 100) -> str:
    """A JSON value on one line, long ones cut; a list of one repeated value is told by its length."""
    if isinstance(value, list) and len(value) > 4 and all(item == value[0] for item in value):
        return f"{len(value)} x {_brief(value[0])}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
