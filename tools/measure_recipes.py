"""Measure recipes: every model, text, recipe, number of steps and seed of a plan, beside its control, in one table.

    python tools/measure_recipes.py PLAN.toml FOLDER [--table-only] [--only WORD ...]

Every run is a `polish` in a process of its own, then a `gate` over what it wrote and an `eval` on every other text.
Their JSON reports stay in FOLDER, the models don't; what is there is not run again, and a run that was killed goes on
from its checkpoint. `--only`: runs whose name has all these words. FOLDER/table.md and FOLDER/table.json are made anew
from all reports that are there.

The control of a run is the same polish with exact attention on both sides (--polish-only, with KL to the exact model as
it was): what it gains is learnt from the text, not mended.

PLAN.toml:
    seeds = [0, 1, 2]
    steps = [25, 50, 100]
    [common.train]                       # settings of every run, by section, as --config takes them
    eval_every = 25
    [models.demo]                        # `file`, and settings of this model's runs
    file = "cortiq_fcd/data/demo.cmf"
    o1 = { layers = "all", m = 16, w = 8, sink = 4 }
    [texts.wiki]                         # `train` and `val`; leave both out for the built-in text
    train = "wiki_train.txt"
    val = "wiki_val.txt"
    [recipes.plus]                       # settings of the training of this recipe's runs
    recipe = "plus"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]
GATE = ("threshold", "slack", "profile")  # what `gate` is told, too


@dataclass(frozen=True)
class Run:
    """One polish and what is measured of its outcome."""

    model: str
    text: str
    recipe: str
    steps: int
    seed: int
    control: bool

    @property
    def name(self) -> str:
        kind = "-control" if self.control else ""
        return f"{self.model}-{self.text}-{self.recipe}{kind}-{self.steps}-seed{self.seed}"


def runs(plan: Table) -> Iterator[Run]:
    """In an order that fills the table row by row, seeds last."""
    for seed in plan["seeds"]:
        for model, own in plan["models"].items():
            for text in own.get("texts", plan["texts"]):
                for steps in own.get("steps", plan["steps"]):
                    for recipe in own.get("recipes", plan["recipes"]):
                        for control in (False, True):
                            yield Run(model, text, recipe, steps, seed, control)


def settings(plan: Table, run: Run) -> Table:
    """What the polish of a run is told, by section: common, then the model's, then the recipe's."""
    model, text = plan["models"][run.model], plan["texts"][run.text]
    merged: Table = {}
    for source in (plan.get("common", {}), model, {"train": plan["recipes"][run.recipe]}, {"corpus": text}):
        for section, values in source.items():
            if isinstance(values, dict):
                merged[section] = {**merged.get(section, {}), **values}
    train = {"steps": run.steps, "seed": run.seed, "polish_only": run.control}
    merged["train"] = {**merged.get("train", {}), **train}
    merged["gate"] = {**merged.get("gate", {}), "enabled": False}  # the recipe is measured, not the gate's choice
    return merged


def measure(plan: Table, run: Run, folder: Path) -> None:
    """Make the reports of a run that are not there."""
    report = folder / f"{run.name}.report.json"
    source, told = plan["models"][run.model]["file"], settings(plan, run)
    others = [] if run.control else [text for text in plan["texts"] if text != run.text]
    wanted = [] if run.control else [folder / f"{run.name}.gate.json"]
    wanted += [folder / f"{run.name}.eval-{text}.json" for text in others]
    if report.exists() and all(path.exists() for path in wanted):
        return
    out = folder / f"{run.name}.cmf"
    config = folder / f"{run.name}.toml"
    config.write_text(to_toml(told), encoding="utf-8")
    if not out.exists():
        call(
            "polish", source, out, "--config", config, "--report", report.with_suffix(".partial"), "--progress", "none"
        )
    if not run.control:
        gate = plan.get("common", {}).get("gate", {})
        flags = [word for name in GATE if name in gate for word in (f"--gate-{name}", gate[name])]
        asked = [*flags, "--seq", told["train"].get("seq", 512), "--batch", told["train"].get("batch", 2)]
        text = ["--text", told["corpus"]["val"]] if "val" in told["corpus"] else []
        wanted[0].write_text(call("gate", out, "--before", source, *text, *asked, "--json", "-q", fails=10))
        for name, path in zip(others, wanted[1:], strict=True):
            text = ["--text", plan["texts"][name]["val"]] if "val" in plan["texts"][name] else []
            path.write_text(call("eval", out, *text, "--config", config, "--json", "-q"), encoding="utf-8")
    report.with_suffix(".partial").replace(report)
    out.unlink()
    config.unlink()


def call(*words: object, fails: int = 0) -> str:
    """The standard output of a command of ours. `fails`: an exit code that is a result, too."""
    command = [sys.executable, "-m", "cortiq_fcd", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ)
    if done.returncode not in (0, fails):
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}")
    return done.stdout


def to_toml(told: Table) -> str:
    """Sections of plain values; JSON writes these as TOML does."""
    lines = []
    for section, values in told.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


# The table


def figures(run: Run, folder: Path, texts: list[str]) -> Table | None:
    """The numbers of a run whose reports are there."""
    path = folder / f"{run.name}.report.json"
    if not path.exists():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    steps = [loss["seconds"] for loss in report["losses"]]
    found: Table = {
        "exact": report["ppl"]["served"]["teacher"],
        "start": report["ppl"]["served"]["start"],
        "served": report["ppl"]["served"]["final"],
        "kl_start": report["kl_served"]["start"],
        "kl": report["kl_served"]["final"],
        "best_step": report["best_step"],
        "step_s": sorted(steps)[len(steps) // 2],
        "wild_rows": sum(loss.get("wild_rows") or 0 for loss in report["losses"]) / max(1, len(steps)),
        "worst_norm": max(loss["grad_norm"] or 0 for loss in report["losses"]),
    }
    gate = folder / f"{run.name}.gate.json"
    if gate.exists() and (judged := json.loads(gate.read_text()))["status"] == "ran":
        found |= {name: max(judged[key]) for name, key in (("loops", "scores"), ("loops_start", "baseline"))}
        found["tight"] = judged["tight_loops"]
        found["loops_exact"] = max(judged["exact"] or [0])
    for text in texts:
        other = folder / f"{run.name}.eval-{text}.json"
        if other.exists():
            measured = json.loads(other.read_text())
            found[f"other {text}"] = measured["served"]["ppl"]
    return found


def summary(plan: Table, folder: Path) -> list[Table]:
    """One row for every model, text, steps and recipe: means over seeds, and half the range as the spread."""
    rows: dict[tuple[Any, ...], Table] = {}
    texts = list(plan["texts"])
    for run in runs(plan):
        found = figures(run, folder, texts)
        if found is None:
            continue
        key = (run.model, run.text, run.steps, run.recipe)
        row = rows.setdefault(key, dict(zip(("model", "text", "steps", "recipe"), key, strict=True)))
        if run.control:
            row.setdefault("control", []).append(found["served"])
            row["exact"] = found["exact"]
            continue
        for name, value in found.items():
            row.setdefault(f"all {name}", []).append(value)
    for row in rows.values():
        for name in [name for name in row if name.startswith("all ")]:
            values = [value for value in row.pop(name) if value is not None]
            if values:
                row[name[4:]] = sum(values) / len(values)
                row[f"{name[4:]} spread"] = (max(values) - min(values)) / 2
                row["seeds"] = max(row.get("seeds", 0), len(values))
        if "control" in row:
            row["control"] = sum(row["control"]) / len(row["control"])
    return list(rows.values())


COLUMNS = (
    ("recipe", "recipe", ""), ("steps", "steps", "d"), ("seeds", "seeds", "d"), ("exact", "exact", ".2f"),
    ("start", "start", ".2f"), ("served", "served", ".3f"), ("kl_start", "KL start", ".4f"), ("kl", "KL", ".4f"),
    ("control", "control", ".3f"), ("loops_start", "loops start", ".2f"), ("loops", "loops", ".2f"),
    ("tight", "tight", ".1f"), ("best_step", "best step", ".0f"), ("step_s", "s/step", ".2f"),
)  # fmt: skip


def to_markdown(rows: list[Table], texts: list[str]) -> str:
    """A table for each model and text."""
    columns = [*COLUMNS, *((f"other {text}", f"on {text}", ".2f") for text in texts)]
    lines = []
    for place in dict.fromkeys((row["model"], row["text"]) for row in rows):
        here = [row for row in rows if (row["model"], row["text"]) == place]
        shown = [column for column in columns if any(row.get(column[0]) is not None for row in here)]
        lines += [f"## {place[0]}, trained on {place[1]}", ""]
        lines += ["| " + " | ".join(title for _, title, _ in shown) + " |", "|" + " --- |" * len(shown)]
        for row in sorted(here, key=lambda row: (row["steps"], row["recipe"])):
            lines.append("| " + " | ".join(cell(row, name, form) for name, _, form in shown) + " |")
        lines.append("")
    return "\n".join(lines)


def cell(row: Table, name: str, form: str) -> str:
    """A number with its spread, where it has one that shows."""
    value = row.get(name)
    if value is None:
        return ""
    spread = row.get(f"{name} spread", 0.0)
    shown = format(value, form)
    return f"{shown} ± {format(spread, form)}" if form.endswith("f") and float(format(spread, form)) > 0 else shown


def main() -> None:
    parser = argparse.ArgumentParser(description="measure recipes")
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    plan = tomllib.loads(args.plan.read_text(encoding="utf-8"))
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.table_only:
        wanted = [run for run in runs(plan) if all(word in run.name for word in args.only)]
        for number, run in enumerate(wanted, 1):
            print(f"{number}/{len(wanted)} {run.name}", flush=True)
            measure(plan, run, args.folder)
    rows = summary(plan, args.folder)
    (args.folder / "table.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    (args.folder / "table.md").write_text(to_markdown(rows, list(plan["texts"])), encoding="utf-8")
    print(to_markdown(rows, list(plan["texts"])))


if __name__ == "__main__":
    main()
