"""The outcome of a polish in one plain sentence, for people who have never seen a report."""

from __future__ import annotations

from cortiq_fcd.stages.report import GateEval, Report, Triple


def sentence(report: Report) -> str:
    """What happened, what it is worth, and what the gate said."""
    parts = _polished(report) if report.outcome == "polished" else _identity(report)
    return "; ".join(part for part in parts if part) + "."


def is_worse(report: Report) -> bool:
    """Whether OUT is worse than the conversion where it counts: served positions, else the final windows."""
    pair = before_and_after(report)[1]
    return pair.start is not None and pair.final is not None and pair.final > pair.start


def before_and_after(report: Report) -> tuple[str, Triple]:
    """The name and the perplexities that a before-and-after sentence quotes."""
    served = report.ppl.served
    if served.start is not None and served.final is not None:
        return "perplexity of served positions", served
    return "perplexity of the final windows", report.ppl.final_windows


def _polished(report: Report) -> list[str]:
    name, ppl = before_and_after(report)
    head = f"Polished, but worse than the {_before(report)} where it counts" if is_worse(report) else "Polished"
    measured = "was not measured" if ppl.start is None or ppl.final is None else f"{_arrow(ppl)}{_teacher(ppl)}"
    parts = [f"{head}: {name} {measured}{_kl(report)}"]
    parts[0] += f", chosen at step {report.best_step} of {report.steps_run}"
    whole = report.ppl.final_windows
    if ppl is not whole and whole.start is not None and whole.final is not None and whole.final > whole.start:
        parts.append(f"over whole windows it rose {_arrow(whole)}")
    if _learned_text(report):
        parts.append("KL rose, so it learned this kind of text rather than mended what the conversion cost")
    return [*parts, _gate(report)]


def _learned_text(report: Report) -> bool:
    """Whether perplexity fell while the distance to the exact model grew."""
    start, final = report.kl_served.start, report.kl_served.final
    return start is not None and final is not None and final > start and not is_worse(report)


def _identity(report: Report) -> list[str]:
    name, ppl = before_and_after(report)
    number = ppl.start if ppl.start is not None else ppl.final
    measured = f" ({name} {_num(number)}{_teacher(ppl)})" if number is not None else ""
    said = f"Identity: {_identity_reason(report)}, so OUT holds the source weights{measured}"
    return [said, _gate_skipped(report), f"to try next: {_to_try(report)}"]


def _to_try(report: Report) -> str:
    """What might help."""
    lr = "smaller" if _rose(report) else "larger"
    other = "more text (--corpus)" if report.recipe.polish_only else "a wider --o1-window (docs/choosing.md)"
    return f"more --steps, a {lr} --lr, or {other}"


def _rose(report: Report) -> bool:
    """Whether training made it worse from its first validation on."""
    first = next((entry.ppl for entry in report.evals if entry.step > 0 and entry.ppl is not None), None)
    return first is not None and report.ppl.start is not None and first > report.ppl.start


def _identity_reason(report: Report) -> str:
    trained = [entry for entry in report.gate.evals if entry.step > 0]
    if report.gate.status == "ran" and trained and report.gate.chosen is None and not any(e.passed for e in trained):
        return "no checkpoint passed the generation gate"
    return f"nothing beat the {_before(report)} as it was"


def _before(report: Report) -> str:
    """What the run started from."""
    return "model" if report.recipe.polish_only else "conversion"


def _gate(report: Report) -> str:
    if report.gate.status == "skipped":
        return _gate_skipped(report)
    chosen = next((entry for entry in report.gate.evals if entry.step == report.best_step), None)
    baseline = report.gate.baseline
    if chosen is None or chosen.scores is None or baseline is None:
        return ""
    return _loops(baseline, chosen, report.gate.threshold)


def _loops(baseline: list[float], chosen: GateEval, threshold: float) -> str:
    scores = chosen.scores or []
    before, after = max(baseline, default=0.0), max(scores, default=0.0)
    if after <= threshold < before:
        return f"generated text no longer loops (worst loop score {before:.2f} -> {after:.2f}, limit {threshold:.2f})"
    if any(now > was for was, now in zip(baseline, scores, strict=False)):
        worst = f"worst loop score {after:.2f}, was {before:.2f}, limit {threshold:.2f}"
        return f"the gate passed, though some prompts loop more than before ({worst})"
    if after < before:
        return f"no prompt loops more than before (worst loop score {before:.2f} -> {after:.2f})"
    return "no prompt loops more than before"


def _gate_skipped(report: Report) -> str:
    if report.gate.status != "skipped":
        return ""
    return f"the generation gate was skipped{': ' + report.gate.reason if report.gate.reason else ''}".rstrip(".")


def _kl(report: Report) -> str:
    start, final = report.kl_served.start, report.kl_served.final
    if start is None or final is None or start <= 0:
        return ""
    return f", KL to the exact model {_percent(100 * (final - start) / start)}"


def _percent(change: float) -> str:
    return f"{change:+.0f} %" if abs(change) >= 10 else f"{change:+.1f} %"


def _teacher(ppl: Triple) -> str:
    return "" if ppl.teacher is None else f" (exact attention: {_num(ppl.teacher)})"


def _arrow(ppl: Triple) -> str:
    return f"{_num(ppl.start)} -> {_num(ppl.final)}"


def _num(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.1f}" if value >= 30 else f"{value:.2f}"
