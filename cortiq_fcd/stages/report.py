"""The JSON report and the record inside the file, as pydantic models: the source of schemas/.

Perplexities are exp(mean NLL in nats) and have no unit. A number that was not measured is null, with a reason in
`warnings`; NaN and infinity are refused. Nothing here imports torch, so that reading a report is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cortiq_fcd.stages.config import SaveDtype
from cortiq_fcd.stages.records import Document, RecipeElements, RecipeInfo, Record

SCHEMA_ID: Literal["cortiq-fcd-report/1"] = "cortiq-fcd-report/1"

MOST_NUMBER = 1e305  # no exp(mean NLL) that is counted as finite is larger

Outcome = Literal["polished", "identity"]
Place = Literal["memory", "disk"]
GateStatus = Literal["ran", "skipped"]


class RanksInfo(Record):
    """The processes that trained together; one number for each."""

    shard_optimizer: bool = Field(description="masters and moments were divided")
    shard_model: bool = Field(description="frozen layers were divided")
    sent_bytes: list[int] = Field(description="what each sent in a step, by calculation, without headers, bytes")
    peak_rss_bytes: list[int | None] = Field(description="peak resident set of each, bytes; null = not known")


class ToolInfo(Record):
    """The program that wrote the file, and what it ran on."""

    name: str = Field(description="program name")
    version: str = Field(description="program version")
    torch: str = Field(description="torch version")
    python: str = Field(description="Python version")
    device: str = Field(description="device that trained, as torch names it")
    precision: str = Field(description="of matrix products, f32 or bf16; everything else is f32 or wider")
    threads: int = Field(ge=1, description="CPU threads used")
    world_size: int = Field(default=1, ge=1, description="processes that trained together")
    ranks: RanksInfo | None = Field(default=None, description="how they shared the work; null = one alone")


class SourceInfo(Record):
    """The file that was polished."""

    path: str = Field(description="path as given")
    bytes: int = Field(ge=0, description="size in bytes, all shards")
    dir_hash: str = Field(description="hash64 of the tensor directory, 16 hex digits; shard 1's if sharded")
    arch_name: str | None = Field(description="arch_name of the header; null when the header has none")
    layers: int = Field(ge=0, description="layers of the model")
    params: int = Field(ge=0, description="weights in the file")


class OutputInfo(Record):
    """The file that was written."""

    path: str = Field(description="path as given")
    bytes: int = Field(ge=0, description="size in bytes")
    dir_hash: str = Field(description="hash64 of the tensor directory, 16 hex digits")
    save_dtype: SaveDtype | None = Field(
        description="dtype of the trained tensors; null at identity, nothing was re-encoded"
    )
    tensors_copied: int = Field(ge=0, description="tensors whose bytes are the source's")
    tensors_written: int = Field(ge=0, description="trained tensors, encoded anew")


class LayerCost(Record):
    """What the conversion of one layer costs, all others being exact, before any training."""

    layer: int = Field(ge=0, description="its number, from 0")
    kl: float | None = Field(description="mean KL(exact || converted), nats per position after the seal")


class O1Info(Record):
    """The O(1) kernel as it was used."""

    layers: str | list[int] = Field(
        description="layer set as the runtime reads it: all, deepN or a list of layer numbers"
    )
    m: int = Field(ge=1, description="landmarks per query head, as asked for")
    w: int = Field(ge=1, description="window of exact recent keys, tokens")
    sink: int = Field(ge=0, description="permanent exact first keys, tokens")
    prefill: int = Field(ge=1, description="seal point in training windows, tokens")
    costs: list[LayerCost] | None = Field(
        default=None, description="of every layer that --o1 auto:N could choose; null = the layers were told"
    )


class CorpusInfo(Record):
    """What was trained and measured on."""

    train_tokens: int = Field(ge=0, description="tokens that windows were sampled from")
    val_tokens: int = Field(ge=0, description="validation tokens, never sampled")
    train_sha256: str = Field(description="SHA-256 of the training bytes as used, hex")
    val_sha256: str = Field(description="SHA-256 of the validation bytes as used, hex")
    source: str = Field(description="where the text came from: built-in, or the paths")


class Triple(Record):
    """One perplexity of three models over the same tokens."""

    teacher: float | None = Field(default=None, description="exact attention, source weights; perplexity")
    start: float | None = Field(default=None, description="O(1) attention, source weights; perplexity")
    final: float | None = Field(default=None, description="O(1) attention, weights of OUT; perplexity")


class PplInfo(Record):
    """Perplexities. Quick and final windows are different text: compare only within one set."""

    teacher: float | None = Field(default=None, description="exact attention on the quick windows; perplexity")
    start: float | None = Field(default=None, description="the conversion as it is on the quick windows; perplexity")
    best: float | None = Field(default=None, description="the chosen checkpoint on the quick windows; perplexity")
    final: float | None = Field(default=None, description="weights of OUT on the six-round windows; perplexity")
    final_windows: Triple = Field(default=Triple(), description="all three on the six-round windows")
    served: Triple = Field(
        default=Triple(),
        description="second half of each final window: teacher exact, start and final through the streaming kernel, "
        "final from the weights as written in OUT",
    )
    untouched: float | None = Field(
        default=None, description="weights of OUT on validation windows that chose nothing; null if there are none"
    )


class KlInfo(Record):
    """Mean KL(teacher || student) over the served positions: tells mending from merely learning the text."""

    start: float | None = Field(default=None, description="before training, nats per position")
    final: float | None = Field(default=None, description="weights of OUT, nats per position")


class TextRepetition(Record):
    """How much one continuation repeats itself. rep-n is 1 - unique n-grams / all n-grams."""

    tokens: int = Field(ge=0, description="token ids of the continuation, an end-of-text id included")
    loop_score: float = Field(ge=0, le=1, description="rep-4, 0 for fewer than 5 ids")
    tight_loop: int | None = Field(
        description="period, in tokens, of the loop of at most 32 that the last four repetitions end in; null = none"
    )
    rep_2: float = Field(ge=0, le=1, description="share of repeated 2-grams")
    rep_3: float = Field(ge=0, le=1, description="share of repeated 3-grams")
    rep_4: float = Field(ge=0, le=1, description="share of repeated 4-grams")
    diversity: float = Field(ge=0, le=1, description="product of 1 - rep-n over n = 2, 3, 4; 1 = nothing repeats")


class Repetition(Record):
    """How much the continuations of one set of weights repeat themselves, and one another."""

    texts: list[TextRepetition] = Field(description="one entry a prompt, in order")
    distinct_1: float | None = Field(description="unique tokens of all texts / all tokens; null = no text is so long")
    distinct_2: float | None = Field(description="unique 2-grams of all texts / all 2-grams; null = none is so long")
    distinct_3: float | None = Field(description="unique 3-grams of all texts / all 3-grams; null = none is so long")


class GateEval(Record):
    """The gate's verdict over one checkpoint."""

    step: int = Field(ge=0, description="optimizer steps taken; 0 = the conversion as it is")
    ppl: float | None = Field(description="quick-window perplexity; null if it was not finite")
    scores: list[float] | None = Field(
        description="loop score of each prompt, 0 to 1; null = not decoded, it couldn't win"
    )
    passed: bool | None = Field(description="the verdict; null = not decoded")
    repetition: Repetition | None = Field(default=None, description="its texts measured; null = not decoded")


class Continuation(Record):
    """What a model said after a prompt, greedily."""

    text: str = Field(description="the text; token ids where the model has no tokenizer")
    repeats: list[tuple[int, int]] = Field(
        default=[], description="spans of text, in characters, that lie in 4-grams of tokens which it had said before"
    )


class PromptTexts(Record):
    """One prompt, and its continuations. Null = not decoded."""

    prompt: str = Field(description="the end of the prompt: its last tokens as text")
    teacher: Continuation | None = Field(default=None, description="with exact attention, source weights")
    start: Continuation | None = Field(default=None, description="before training, through the served kernel")
    after: Continuation | None = Field(default=None, description="the checkpoint step, through the served kernel")


class GateTexts(Record):
    """What the gate read."""

    step: int | None = Field(description="checkpoint of after: the chosen one, else the last one judged; null = none")
    prompts: list[PromptTexts] = Field(description="one entry a prompt")


class GateInfo(Record):
    """The generation gate: does greedy text through the served kernel loop."""

    status: GateStatus = Field(description="ran or skipped")
    reason: str = Field(default="", description="why it was skipped, one clause")
    profile: str = Field(default="standard", description="prompts and lengths used")
    prompts: int | None = Field(default=None, description="prompts that were continued; null if skipped")
    prompt_tokens: int | None = Field(default=None, description="length of each prompt, tokens; null if skipped")
    new_tokens: int | None = Field(default=None, description="most tokens of a continuation; null if skipped")
    granularity: float | None = Field(
        default=None, description="step between two loop scores: 1 / 4-grams of a whole continuation; null if skipped"
    )
    threshold: float = Field(description="highest loop score that passes, 0 to 1")
    slack: float = Field(description="how far a prompt may loop more than before training, 0 to 1")
    baseline: list[float] | None = Field(default=None, description="loop score of each prompt before training, 0 to 1")
    teacher: list[float] | None = Field(
        default=None, description="loop scores with exact attention; null if not decoded"
    )
    teacher_repetition: Repetition | None = Field(
        default=None, description="the texts of exact attention measured; null if not decoded"
    )
    evals: list[GateEval] = Field(default=[], description="one entry a checkpoint, in order")
    chosen: int | None = Field(default=None, description="step of the checkpoint that passed and won; null = none")
    texts: GateTexts | None = Field(default=None, description="what was said before and after; null = nothing was")


class EvalRecord(Record):
    """A validation on the quick windows."""

    step: int = Field(ge=0, description="optimizer steps taken; 0 = the conversion as it is")
    ppl: float | None = Field(description="perplexity; null if it was not finite")
    averaged: bool = Field(default=False, description="of the average of the weights, which was better than they were")


class LossRecord(Record):
    """One optimizer step; means over the step's positions, unweighted."""

    step: int = Field(ge=1, description="1-based")
    ce: float | None = Field(description="cross entropy, nats; null if it was not finite")
    kl: float | None = Field(description="KL(teacher || student), nats; null if it was not finite")
    grad_norm: float | None = Field(description="global gradient norm before clipping; null = not finite, step skipped")
    seconds: float = Field(ge=0, description="duration in seconds")
    match: float | None = Field(
        default=None, description="distance of layers' outputs from the exact ones, relative; null = not in the loss"
    )
    wild_rows: int | None = Field(
        default=None,
        ge=0,
        description="rows of O(1) kernels, heads counted one by one, longer than every value they sum; null = unknown",
    )


class MemoryInfo(Record):
    """Peak memory of the process, or of the one of several that used most."""

    peak_rss_bytes: int | None = Field(default=None, ge=0, description="peak resident set, bytes")
    peak_device_bytes: int | None = Field(default=None, ge=0, description="peak accelerator memory, bytes; null on CPU")


class MemoryPlan(Record):
    """How a polish was to live in the memory that it had, as planned before its first step."""

    budget_bytes: int | None = Field(ge=0, description="--memory-budget, bytes; null = none was given")
    estimated_bytes: int = Field(ge=0, description="peak memory as estimated before the first step, bytes")
    layers_streamed: int = Field(ge=0, description="layers with weights that are read from the file at every visit")
    teacher_layers_streamed: int | None = Field(ge=0, description="the same of a teacher file; null = there is none")
    layers_recomputed: int = Field(ge=0, description="layers whose activations are computed again in the backward")
    best_state: Place = Field(description="where the best state is kept: memory or disk")
    moments: Place = Field(description="where the moments of the optimizer are: memory or disk")


class PolishMemory(MemoryInfo):
    """Peak memory of a polish, and the plan before it."""

    plan: MemoryPlan | None = Field(default=None, description="the plan; null = an older program, which told none")


class Report(Document):
    """What a polish did: OUT.report.json."""

    schema_id: Literal["cortiq-fcd-report/1"] = Field(
        default=SCHEMA_ID, alias="schema", description="this format's name"
    )
    outcome: Outcome = Field(description="polished: trained weights are in OUT; identity: OUT holds the source weights")
    best_step: int = Field(ge=0, description="optimizer steps behind the weights in OUT; 0 at identity")
    steps_run: int = Field(ge=0, description="optimizer steps taken")
    converted_layers: list[int] = Field(description="layers that run the O(1) kernel, from 0")
    trainable_params: int = Field(ge=0, description="weights that were trained")
    tool: ToolInfo
    created: str = Field(description="UTC time of writing, ISO 8601")
    source: SourceInfo
    output: OutputInfo
    o1: O1Info
    recipe: RecipeInfo
    corpus: CorpusInfo
    ppl: PplInfo
    kl_served: KlInfo = KlInfo()
    gate: GateInfo
    evals: list[EvalRecord] = Field(default=[], description="every validation, step 0 first")
    losses: list[LossRecord] = Field(default=[], description="every step")
    timing: dict[str, float] = Field(default={}, description="seconds of each stage; polish.X: of a phase of polish")
    memory: PolishMemory = PolishMemory()
    warnings: list[str] = Field(default=[], description="what a user should know")

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file. Raises OSError or ValueError."""
        report = cls.model_validate_json(path.read_bytes())
        if not _is_in_range(report.model_dump()):
            raise ValueError(f"a number in it is beyond {MOST_NUMBER:g}")
        return report


def _is_in_range(value: object) -> bool:
    """Whether every number can be computed with: JSON has integers of any size."""
    if isinstance(value, dict):
        return all(map(_is_in_range, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_in_range, value))
    return not isinstance(value, int | float) or -MOST_NUMBER <= value <= MOST_NUMBER


class ProvenanceTool(Record):
    """The program that wrote the record."""

    name: str = Field(description="program name")
    version: str = Field(description="program version")


class ProvenanceSource(Record):
    """The file that was polished."""

    dir_hash: str = Field(description="hash64 of its tensor directory, 16 hex digits")


class ProvenanceCorpus(Record):
    """What was trained on."""

    train_sha256: str = Field(description="SHA-256 of the training bytes as used, hex")
    val_sha256: str = Field(description="SHA-256 of the validation bytes as used, hex")


class ProvenanceGate(Record):
    """The gate's result in short; the report has the rest."""

    status: GateStatus = Field(description="ran or skipped")
    profile: str = Field(default="standard", description="prompts and lengths used")
    threshold: float = Field(description="highest loop score that passes, 0 to 1")
    slack: float = Field(description="how far a prompt may loop more than before training, 0 to 1")
    baseline: list[float] | None = Field(description="loop score of each prompt before training; null if skipped")
    chosen: int | None = Field(description="step of the checkpoint that passed and won; null = none")


class Provenance(Record):
    """`provenance.fcd` of a polished file. The first ten fields are named as other readers of such files know them."""

    steps: int = Field(ge=0, description="optimizer steps taken")
    lr: float = Field(description="AdamW learning rate")
    kl_w: float = Field(description="weight of KL(teacher || student); CE has the rest")
    bs: int = Field(ge=1, description="windows per step")
    seq: int = Field(ge=2, description="window length, tokens")
    teacher_ppl: float | None = Field(description="exact attention on the quick windows; perplexity")
    ppl_start: float | None = Field(description="the conversion as it is on the quick windows; perplexity")
    ppl_final: float | None = Field(description="weights of the file on the six-round windows; perplexity")
    best_step: int = Field(ge=0, description="optimizer steps behind the weights of the file; 0 at identity")
    converted_layers: list[int] = Field(description="layers that run the O(1) kernel, from 0")
    seed: int = Field(ge=0, description="seed of the window sampler")
    elements: RecipeElements = Field(default=RecipeElements(), description="the rest of the recipe")
    averaged: bool = Field(default=False, description="the weights are an average over steps up to best_step")
    prefill: int = Field(ge=1, description="seal point in training windows, tokens")
    outcome: Outcome = Field(description="polished or identity")
    gate: ProvenanceGate
    save_dtype: SaveDtype | None = Field(description="dtype of the trained tensors; null at identity")
    tool: ProvenanceTool
    source: ProvenanceSource
    corpus: ProvenanceCorpus
    final_windows: Triple = Field(description="teacher, start and final on the six-round windows; perplexity")
