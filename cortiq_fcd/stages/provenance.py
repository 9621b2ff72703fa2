"""Stage 5: OUT with its provenance, and the JSON report beside it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortiq_fcd.io.atomic import write_atomically
from cortiq_fcd.io.corpus import Corpus
from cortiq_fcd.io.paths import printable
from cortiq_fcd.io.reader import CmfModel
from cortiq_fcd.io.writer import WrittenFile, write_model
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.stages import report as records
from cortiq_fcd.stages.artefacts import Comparison, Evaluation, Gate, Stored, Trained
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.profiles import PROFILES
from cortiq_fcd.stages.records import RecipeElements, RecipeInfo
from cortiq_fcd.stages.repetition import measured


@dataclass(frozen=True)
class Story:
    """Everything that the record and the report tell, gathered by the pipeline."""

    config: PolishConfig
    plan: ModelPlan
    conversion: Conversion
    corpus: Corpus
    trained: Trained
    comparison: Comparison
    gate: Gate | None
    gate_skipped: str
    texts: records.GateTexts | None
    trainable_params: int
    tool: records.ToolInfo
    created: str
    layer_costs: list[records.LayerCost] | None = None

    @property
    def outcome(self) -> records.Outcome:
        """Whether OUT holds trained weights."""
        return "polished" if self.trained.best_step else "identity"

    @property
    def gate_ran(self) -> bool:
        """Whether checkpoints were judged."""
        return not self.gate_skipped

    @property
    def baseline(self) -> list[float] | None:
        """Loop scores of step 0."""
        judgement = self.trained.evaluations[0].judgement
        return list(judgement.scores) if judgement else None

    @property
    def chosen(self) -> int | None:
        """The checkpoint that passed the gate and won."""
        return self.trained.best_step if self.gate_ran and self.trained.passed else None


def run(story: Story, source: CmfModel, out: Path, stored: Stored) -> WrittenFile:
    """Write OUT: source bytes, but for the trained tensors and `provenance`. Errors as `write_model`."""
    header = copy.deepcopy(source.header)
    provenance = header.get("provenance")
    header["provenance"] = {
        **(provenance if isinstance(provenance, dict) else {}),
        # A polish alone converts nothing: whatever the file says about its attention stays.
        **({} if story.conversion.polish_only else {"o1_attn": story.conversion.record()}),
        "fcd": record(story, source).model_dump(mode="json", by_alias=True),
    }
    return write_model(source, out, header=header, replace=stored.tensors, force=story.config.output.force)


def record(story: Story, source: CmfModel) -> records.Provenance:
    """`provenance.fcd`."""
    config, trained = story.config, story.trained
    return records.Provenance(
        steps=len(trained.steps),
        lr=config.train.lr,
        kl_w=config.train.kl,
        bs=config.train.batch,
        seq=config.train.seq,
        teacher_ppl=_finite(trained.teacher_ppl),
        ppl_start=_finite(trained.start_ppl),
        ppl_final=_finite(story.comparison.final.final),
        best_step=trained.best_step,
        converted_layers=list(story.conversion.layers),
        seed=config.train.seed,
        elements=RecipeElements(**config.train.model_dump(include=set(RecipeElements.model_fields))),
        averaged=trained.averaged,
        prefill=story.conversion.seal,
        outcome=story.outcome,
        gate=records.ProvenanceGate(
            status="ran" if story.gate_ran else "skipped",
            profile=config.gate.profile,
            threshold=config.gate.threshold,
            slack=config.gate.slack,
            baseline=story.baseline,
            chosen=story.chosen,
        ),
        save_dtype=config.output.save_dtype if trained.best_step else None,
        tool=records.ProvenanceTool(name=story.tool.name, version=story.tool.version),
        source=records.ProvenanceSource(dir_hash=source.dir_hash),
        corpus=records.ProvenanceCorpus(train_sha256=story.corpus.train_sha256, val_sha256=story.corpus.val_sha256),
        final_windows=_triple(story.comparison, "final"),
    )


def build_report(
    story: Story,
    source: CmfModel,
    out: Path,
    written: WrittenFile,
    timing: dict[str, float],
    memory: records.PolishMemory,
    warnings: list[str],
) -> records.Report:
    """The JSON report."""
    config, trained, comparison = story.config, story.trained, story.comparison
    return records.Report(
        outcome=story.outcome,
        best_step=trained.best_step,
        steps_run=len(trained.steps),
        converted_layers=list(story.conversion.layers),
        trainable_params=story.trainable_params,
        tool=story.tool,
        created=story.created,
        source=records.SourceInfo(
            path=printable(source.path),
            bytes=source.bytes_total,
            dir_hash=source.dir_hash,
            arch_name=story.plan.arch_name,
            layers=len(story.plan.layers),
            params=story.plan.params,
        ),
        output=records.OutputInfo(
            path=printable(out),
            bytes=written.bytes,
            dir_hash=written.dir_hash,
            save_dtype=config.output.save_dtype if trained.best_step else None,
            tensors_copied=written.tensors_copied,
            tensors_written=written.tensors_written,
        ),
        o1=records.O1Info(**story.conversion.record(), prefill=story.conversion.seal, costs=story.layer_costs),
        recipe=RecipeInfo(**config.train.model_dump(mode="json")),
        corpus=records.CorpusInfo(
            train_tokens=len(story.corpus.train),
            val_tokens=len(story.corpus.val),
            train_sha256=story.corpus.train_sha256,
            val_sha256=story.corpus.val_sha256,
            source=printable(story.corpus.source),
        ),
        ppl=records.PplInfo(
            teacher=_finite(trained.teacher_ppl),
            start=_finite(trained.start_ppl),
            best=_finite(trained.best_ppl),
            final=_finite(comparison.final.final),
            final_windows=_triple(comparison, "final"),
            served=_triple(comparison, "served"),
            untouched=_finite(comparison.final.untouched),
        ),
        kl_served=records.KlInfo(start=_finite(comparison.start.kl_served), final=_finite(comparison.final.kl_served)),
        gate=_gate(story),
        evals=[records.EvalRecord(step=e.step, ppl=_finite(e.ppl), averaged=e.averaged) for e in trained.evaluations],
        losses=[
            records.LossRecord(
                step=step.step,
                ce=_finite(step.ce),
                kl=_finite(step.kl),
                grad_norm=_finite(step.grad_norm),
                seconds=step.seconds,
                match=_finite(step.match) if config.train.match else None,
                wild_rows=step.wild_rows,
            )
            for step in trained.steps
        ],
        timing=timing,
        memory=memory,
        warnings=warnings,
    )


def write_report(report: records.Report, path: Path) -> None:
    """Write the report's JSON, whole or not at all."""
    data = report.to_json().encode()
    write_atomically(path, lambda file: file.write(data))


def _gate(story: Story) -> records.GateInfo:
    config, gate, ran = story.config.gate, story.gate, story.gate_ran
    profile = PROFILES[config.profile]
    return records.GateInfo(
        status="ran" if ran else "skipped",
        reason=story.gate_skipped,
        profile=config.profile,
        prompts=profile.prompts if ran else None,
        prompt_tokens=profile.prompt_tokens if ran else None,
        new_tokens=profile.new_tokens if ran else None,
        granularity=profile.granularity if ran else None,
        threshold=config.threshold,
        slack=config.slack,
        baseline=story.baseline,
        teacher=list(gate.exact.scores) if gate else None,
        teacher_repetition=measured(gate.exact.continuations) if gate else None,
        evals=[_gate_eval(e) for e in story.trained.evaluations] if ran else [],
        chosen=story.chosen,
        texts=story.texts,
    )


def _gate_eval(evaluation: Evaluation) -> records.GateEval:
    judgement = evaluation.judgement
    return records.GateEval(
        step=evaluation.step,
        ppl=_finite(evaluation.ppl),
        scores=list(judgement.scores) if judgement else None,
        passed=judgement.passed if judgement else None,
        repetition=measured(judgement.continuations) if judgement else None,
    )


def _triple(comparison: Comparison, name: str) -> records.Triple:
    teacher, start, final = (
        _finite(getattr(figures, name)) for figures in (comparison.teacher, comparison.start, comparison.final)
    )
    return records.Triple(teacher=teacher, start=start, final=final)


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
