"""What a report says, as rows of text: the terminal and the page draw the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cortiq_fcd.display import figures
from cortiq_fcd.stages.report import GateInfo, Report, ToolInfo, Triple

VERDICTS = {True: "passed", False: "failed", None: "not decoded: couldn't win"}
PERPLEXITY_COLUMNS = ("exact", "start", "OUT", "change")
LEAST_SHARE = 0.01  # of the time: what took less is "other"
NEXT = (
    "give it to the program that reads your CMF files: its header tells which layers run the O(1) kernel; "
    "`cortiq-fcd export` makes a HuggingFace directory of it, with exact attention"
)


def perplexity_rows(report: Report) -> list[tuple[str, ...]]:
    """One row a set of tokens, its name and PERPLEXITY_COLUMNS: only numbers in the same row can be compared."""
    ppl, kl = report.ppl, report.kl_served
    quick = Triple(teacher=ppl.teacher, start=ppl.start, final=ppl.best)
    sets = ("served positions", "final windows", "quick windows (these chose)")
    named = zip(sets, (ppl.served, ppl.final_windows, quick), strict=True)
    rows: list[tuple[str, ...]] = [
        (
            name,
            *map(figures.perplexity, (row.teacher, row.start, row.final)),
            figures.change(row.start, row.final),
        )
        for name, row in named
    ]
    rows.append(("untouched windows", "", "", figures.perplexity(ppl.untouched), ""))
    nats = (figures.nats(kl.start), figures.nats(kl.final), figures.change(kl.start, kl.final))
    return [*rows, ("KL to exact, served (nats)", "", *nats)]


@dataclass(frozen=True)
class GateRow:
    """One set of weights before the gate. `passed` null: not judged."""

    name: str
    ppl: str
    scores: str
    verdict: str
    passed: bool | None
    chosen: bool


def gate_rows(gate: GateInfo) -> list[GateRow]:
    """Exact attention, before, and every checkpoint."""
    rows = []
    if gate.teacher is not None:
        rows.append(GateRow("exact attention", "", figures.scores(gate.teacher), "", None, False))
    if gate.baseline is not None and all(entry.step for entry in gate.evals):
        rows.append(GateRow("step 0 (before)", "", figures.scores(gate.baseline), "", None, False))
    for entry in gate.evals:
        name = f"step {entry.step}" if entry.step else "step 0 (before)"
        ppl, scores = figures.perplexity(entry.ppl), figures.scores(entry.scores)
        rows.append(GateRow(name, ppl, scores, VERDICTS[entry.passed], entry.passed, entry.step == gate.chosen))
    return rows


def gate_words(gate: GateInfo) -> str:
    """The rule that was applied, or why none was."""
    if gate.status == "skipped":
        return f"skipped: {gate.reason}"
    words = f"a prompt passes at {gate.threshold:.2f} or less, and at most {gate.slack:.2f} above its score before"
    words += f", in steps of {gate.granularity:.3f}" if gate.granularity is not None else ""
    words += "; strict: a text that ends in a tight loop fails" if gate.profile == "strict" else ""
    return words + ("" if gate.chosen is not None else "; nothing was chosen")


@dataclass(frozen=True)
class TimeRow:
    """Where time went. `share` is of the whole run, 0 to 1; a phase of depth 1 is part of the stage above it."""

    name: str
    seconds: float
    share: float
    depth: int = 0


def time_rows(timing: Mapping[str, float]) -> list[TimeRow]:
    """Stages in order, each followed by its phases (`stage.phase` in `timing`), the longest first; those that took next
    to nothing are told together.
    """
    parts: dict[str, dict[str, float]] = {}
    for name, seconds in timing.items():
        stage, _, phase = name.partition(".")
        if stage in timing and phase:
            parts.setdefault(stage, {})[phase] = seconds
    stages = {
        name: seconds for name, seconds in timing.items() if name.partition(".")[0] not in parts or "." not in name
    }
    whole = sum(stages.values())

    def share(spent: float) -> float:
        return min(max(spent / whole, 0.0), 1.0) if whole > 0 else 0.0

    def folded(spent: Iterable[tuple[str, float]], depth: int) -> list[TimeRow]:
        rows = [TimeRow(name, seconds, share(seconds), depth) for name, seconds in spent]
        small = sum(row.seconds for row in rows if row.share < LEAST_SHARE)
        kept = [row for row in rows if row.share >= LEAST_SHARE]
        return [*kept, TimeRow("other", small, share(small), depth)] if len(kept) < len(rows) else rows

    rows = []
    for row in folded(stages.items(), 0):
        longest_first = sorted(parts.get(row.name, {}).items(), key=lambda part: -part[1])
        rows += [row, *folded(longest_first, 1)]
    return rows


def report_facts(report: Report) -> list[tuple[str, str]]:
    """What was trained on what, and what it took."""
    o1, recipe, corpus, out = report.o1, report.recipe, report.corpus, report.output
    share = f"{figures.count(report.trainable_params)} of {figures.count(report.source.params)} weights"
    saved = f", trained tensors as {out.save_dtype}" if out.save_dtype else ""
    kernel = f"{o1.m} landmarks, window {o1.w}, sink {o1.sink}, seal at {o1.prefill}"
    if o1.costs is not None:
        kernel += f"; the layers cost least of {len(o1.costs)} (--o1 auto:{len(report.converted_layers)})"
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
        ("tool", f"{report.tool.name} {report.tool.version}, torch {report.tool.torch}, {machine(report.tool)}"),
        ("created", report.created),
        ("next", NEXT),
    ]
    if recipe.teacher is not None:
        facts.insert(3, ("teacher", recipe.teacher))
    if (peak := report.memory.peak_rss_bytes) is not None:
        each = f" a process, {report.tool.world_size} of them" if report.tool.world_size > 1 else ""
        facts.insert(-3, ("memory", f"peak {figures.size(peak)}{each}{_planned(report)}"))
    return facts


def _planned(report: Report) -> str:
    """The estimate before the first step, the budget, and what was done for it."""
    plan = report.memory.plan
    if plan is None:
        return ""
    told = ["", f"{figures.size(plan.estimated_bytes)} estimated"]
    if plan.budget_bytes is not None:
        told.append(f"budget {figures.size(plan.budget_bytes)}")
    if plan.best_state == "disk":
        told.append(f"{plan.layers_streamed} layers streamed")
    return ", ".join(told)


def machine(tool: ToolInfo) -> str:
    """What it ran on: device, precision of matrix products, threads."""
    return f"{tool.device} {tool.precision}, {figures.counted(tool.threads, 'thread')}"
