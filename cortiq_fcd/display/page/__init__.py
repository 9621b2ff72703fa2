"""The report as one self-contained HTML page: no network, no script, light and dark."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from jinja2 import Environment, PackageLoader, StrictUndefined

from cortiq_fcd.display import figures
from cortiq_fcd.display.page.plot import EDGES, HEIGHT, WIDTH, Plot, Point, checkpoints_plot, steps_plot
from cortiq_fcd.display.repetition_view import COLUMNS, of_report, repetition_cells
from cortiq_fcd.display.report_rows import (
    PERPLEXITY_COLUMNS,
    gate_rows,
    gate_words,
    perplexity_rows,
    report_facts,
    time_rows,
)
from cortiq_fcd.stages.report import Continuation, GateInfo, LossRecord, Report
from cortiq_fcd.stages.sentence import before_and_after, is_worse, sentence

MARK = "<!doctype html>\n<!-- cortiq-fcd report -->\n"  # how a page of this program begins
PROMPTS_OPEN = 3
EDGE_PERCENT = 20  # nearer to an edge a label is written inwards


def report_page(report: Report) -> str:
    """The page's text. Everything from the report is escaped, and what could steer the eye is shown as an escape."""
    environment = Environment(
        loader=PackageLoader("cortiq_fcd.display", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Numbers are formatted before they come here: whatever arrives as text is data.
        finalize=lambda value: figures.printable_lines(value) if type(value) is str else value,
    )
    page = environment.get_template("report.html.jinja").render(
        mark=MARK,
        r=report,
        name=PurePath(report.output.path).name,
        quoted_path=shlex.quote(report.output.path),
        sentence=sentence(report).replace(" -> ", " → "),
        badge=_badge(report),
        tiles=list(_tiles(report)),
        scale=_scale(report),
        perplexities=perplexity_rows(report),
        columns=PERPLEXITY_COLUMNS,
        gate=gate_rows(report.gate),
        gate_words=gate_words(report.gate),
        repetition=(COLUMNS, [(name, repetition_cells(found)) for name, found in of_report(report.gate) if found]),
        texts=list(_texts(report.gate)),
        plots=[plot for plot in _plots(report) if plot is not None],
        size=(WIDTH, HEIGHT),
        edges=EDGES,
        times=time_rows(report.timing),
        facts=report_facts(report),
        hashes=_hashes(report),
        figures=figures,
    )
    return page.replace("\r", "")


def _badge(report: Report) -> tuple[str, str]:
    """Word and class."""
    if report.outcome == "identity":
        return "identity", "plain"
    return ("polished, but worse", "bad") if is_worse(report) else ("polished", "good")


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, number, and what it is compared with."""
    name, ppl = before_and_after(report)
    yield (
        name,
        figures.perplexity(ppl.final),
        f"{figures.change(ppl.start, ppl.final)}, from {figures.perplexity(ppl.start)}; "
        f"exact {figures.perplexity(ppl.teacher)}",
    )
    kl = report.kl_served
    yield (
        "KL to the exact model, nats",
        figures.nats(kl.final),
        f"{figures.change(kl.start, kl.final)}, from {figures.nats(kl.start)}",
    )
    scores = next((e.scores for e in report.gate.evals if e.step == report.best_step and e.scores), None)
    if scores and report.gate.baseline:
        yield (
            "worst loop score",
            f"{max(scores):.2f}",
            f"from {max(report.gate.baseline):.2f}; limit {report.gate.threshold:.2f}",
        )
    whole_s = sum(row.seconds for row in time_rows(report.timing) if not row.depth)
    yield (
        "chosen at step",
        str(report.best_step),
        f"of {report.steps_run}, {figures.duration(whole_s)}",
    )


@dataclass(frozen=True)
class ScalePoint:
    """A perplexity on a line; `kind` is its classes in the style sheet, `percent` its place from the left."""

    percent: float
    kind: str
    label: str


@dataclass(frozen=True)
class Scale:
    """Where OUT stands between the exact model and the conversion."""

    spoken: str
    points: list[ScalePoint]


def _scale(report: Report) -> Scale | None:
    name, ppl = before_and_after(report)
    if ppl.teacher is None or ppl.start is None or ppl.final is None:
        return None
    named = (("exact", "exact over", ppl.teacher), ("start", "start over", ppl.start), ("OUT", "out under", ppl.final))
    low, high = min(value for *_, value in named), max(value for *_, value in named)
    if high == low:
        return None
    points = []
    for word, kind, value in named:
        percent = round(4 + 92 * (value - low) / (high - low), 2)
        side = "left" if percent < EDGE_PERCENT else "right" if percent > 100 - EDGE_PERCENT else ""
        points.append(ScalePoint(percent, f"{kind} {side}", f"{word} {figures.perplexity(value)}"))
    return Scale(f"{name}: {', '.join(point.label for point in points)}", points)


@dataclass(frozen=True)
class Said:
    """A continuation in pieces: text, and whether it repeats."""

    name: str
    kind: str
    score: str
    pieces: list[tuple[str, bool]]


def _texts(gate: GateInfo) -> Iterator[tuple[str, list[Said], bool]]:
    """Prompt, continuations, and whether it is shown without being asked for."""
    if gate.texts is None:
        return
    after = f"step {gate.texts.step}{' (chosen)' if gate.texts.step == gate.chosen else ' (rejected)'}"
    judged = {entry.step: entry.scores for entry in gate.evals}
    after_scores = judged.get(gate.texts.step) if gate.texts.step is not None else None
    for number, prompt in enumerate(gate.texts.prompts):
        columns = (
            ("exact attention", "exact", prompt.teacher, gate.teacher),
            ("before", "start", prompt.start, gate.baseline),
            (after, "out", prompt.after, after_scores),
        )
        said = [
            Said(name, kind, f"{scores[number]:.2f}" if scores and number < len(scores) else "-", _pieces(text))
            for name, kind, text, scores in columns
            if text is not None
        ]
        yield figures.prompt_end(prompt.prompt), said, number < PROMPTS_OPEN


def _pieces(said: Continuation) -> list[tuple[str, bool]]:
    pieces, at = [], 0
    for start, stop in said.repeats:
        pieces += [(said.text[at:start], False), (said.text[start:stop], True)]
        at = stop
    pieces = [(text, marked) for text, marked in [*pieces, (said.text[at:], False)] if text]
    return [(pieces[0][0].lstrip(" "), pieces[0][1]), *pieces[1:]] if pieces else []


def _plots(report: Report) -> Iterator[Plot | None]:
    yield steps_plot("Cross entropy, nats", _series(report.losses, "ce"))
    yield steps_plot("KL to the exact model, nats", _series(report.losses, "kl"))
    yield steps_plot("Gradient norm before clipping", _series(report.losses, "grad_norm"))
    judged = {entry.step: "good" if entry.passed else "bad" for entry in report.gate.evals if entry.passed is not None}
    evals = [entry for entry in report.evals if entry.ppl is not None]
    kinds = ["chosen" if entry.step == report.best_step else judged.get(entry.step, "muted") for entry in evals]
    levels = [(report.ppl.start, "start", "start"), (report.ppl.teacher, "exact", "exact")]
    known = [(value, label, kind) for value, label, kind in levels if value is not None]
    points = [(float(entry.step), entry.ppl) for entry in evals if entry.ppl is not None]
    yield checkpoints_plot("Validation perplexity, quick windows", points, kinds, known)


def _series(losses: list[LossRecord], field: str) -> list[Point]:
    return [(float(entry.step), getattr(entry, field)) for entry in losses if getattr(entry, field) is not None]


def _hashes(report: Report) -> list[tuple[str, str]]:
    corpus = report.corpus
    rows = [
        ("source, tensor directory", report.source.dir_hash),
        ("output, tensor directory", report.output.dir_hash),
    ]
    if corpus.train_sha256 != corpus.val_sha256:
        return [
            *rows,
            ("training text, SHA-256", corpus.train_sha256),
            ("validation text, SHA-256", corpus.val_sha256),
        ]
    name = "text, SHA-256 (training and validation)"
    if "; val: its last " in corpus.source:
        name = "text, SHA-256 (validation is its last tenth, never trained on)"
    return [*rows, (name, corpus.train_sha256)]
