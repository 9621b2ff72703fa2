"""What `eval` and `gate` find out about a file, as pydantic models: the source of their schemas.

A number that was not measured is null, and `reason` or `warnings` says why. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cortiq_fcd.stages.records import Document, Record
from cortiq_fcd.stages.report import (
    Continuation,
    GateStatus,
    MemoryInfo,
    O1Info,
    Repetition,
    SourceInfo,
    ToolInfo,
)


class TextInfo(Record):
    """What was measured on."""

    source: str = Field(description="where the text came from: built-in, or the path")
    sha256: str = Field(description="SHA-256 of the bytes as used, hex")
    tokens: int = Field(ge=0, description="token ids of the text")


class WindowsInfo(Record):
    """Which tokens of the text: windows spread over it, and of each the tokens after the prompt part."""

    count: int = Field(ge=1, description="windows")
    seq: int = Field(ge=2, description="window length, tokens")
    prefill: int = Field(ge=1, description="tokens at the beginning of a window that are its prompt")
    positions: int = Field(ge=1, description="predicted tokens: count x (seq - prefill)")


class Side(Record):
    """One kind of attention over these tokens, fed one by one after an exact pass over the prompt part."""

    ppl: float | None = Field(description="perplexity; null if it was not finite")
    seconds: float = Field(ge=0, description="duration of all of it in seconds, prompt passes included")
    tokens_per_s: float = Field(ge=0, description="decoded tokens a second, all windows together, prompt passes aside")


Varied = Literal["landmarks", "window", "sinks"]


class SweepRow(Record):
    """One setting of the O(1) kernel, tried on the same tokens."""

    varied: Varied = Field(description="which number differs from the setting of the file or of the flags")
    m: int | None = Field(description="landmarks per query head; null = without a far field, which no runtime serves")
    w: int = Field(ge=1, description="window of exact recent keys, tokens")
    sink: int = Field(ge=0, description="permanent exact first keys, tokens")
    ppl: float | None = Field(description="perplexity; null if it was not finite")
    ratio: float | None = Field(description="its ratio to that of exact attention; null if not finite")
    kl: float | None = Field(description="mean KL(exact || served), nats per position; null if not finite")


class EvalReport(Document):
    """What `eval` prints as JSON."""

    schema_id: Literal["cortiq-fcd-eval/1"] = Field(
        default="cortiq-fcd-eval/1", alias="schema", description="this format's name"
    )
    tool: ToolInfo
    created: str = Field(description="UTC time of measuring, ISO 8601")
    file: SourceInfo
    o1: O1Info | None = Field(description="the O(1) kernel as it was used; null = exact attention alone")
    text: TextInfo
    windows: WindowsInfo
    exact: Side
    served: Side | None = Field(description="the served O(1) kernel; null = reason")
    ratio: float | None = Field(description="served perplexity / exact perplexity; null = reason")
    kl: float | None = Field(description="mean KL(exact || served), nats per position; null = reason")
    reason: str = Field(default="", description="why served, ratio and kl are null")
    sweep: list[SweepRow] | None = Field(
        default=None, description="other settings, by --sweep, all tokens of a window at once; null = not measured"
    )
    memory: MemoryInfo
    warnings: list[str] = Field(default=[], description="what a user should know")


class PromptVerdict(Record):
    """One prompt of the gate and what follows it."""

    offset: int = Field(ge=0, description="where in the text it begins, tokens")
    prompt: str = Field(description="the end of the prompt: its last tokens as text")
    ids: list[int] = Field(description="token ids of the continuation")
    text: Continuation = Field(description="the continuation, through the attention that is judged")
    exact: Continuation | None = Field(description="with exact attention; null = that is what is judged")
    before: Continuation | None = Field(description="of the file given as --before; null = none was given")
    passed: bool = Field(description="whether this prompt passes")


class GateReport(Document):
    """What `gate` prints as JSON."""

    schema_id: Literal["cortiq-fcd-gate/1"] = Field(
        default="cortiq-fcd-gate/1", alias="schema", description="this format's name"
    )
    tool: ToolInfo
    created: str = Field(description="UTC time of judging, ISO 8601")
    file: SourceInfo
    before: SourceInfo | None = Field(description="the file whose scores are the baseline; null = none was given")
    o1: O1Info | None = Field(description="the O(1) kernel as it was used; null = exact attention was judged")
    text: TextInfo
    status: GateStatus = Field(description="ran or skipped")
    reason: str = Field(default="", description="why it was skipped, one clause")
    passed: bool | None = Field(description="the verdict; null = skipped")
    profile: str = Field(description="prompts and lengths used")
    threshold: float = Field(description="highest loop score that passes, 0 to 1")
    slack: float = Field(description="how far a prompt may loop more than in --before, 0 to 1")
    prompt_tokens: int = Field(description="length of each prompt, tokens")
    new_tokens: int = Field(description="most tokens of a continuation")
    granularity: float = Field(description="step between two loop scores: 1 / 4-grams of a whole continuation")
    scores: list[float] | None = Field(default=None, description="loop score of each prompt, 0 to 1; null = skipped")
    exact: list[float] | None = Field(
        default=None,
        description="loop scores with exact attention (of --before where it was given); null = not decoded",
    )
    baseline: list[float] | None = Field(default=None, description="loop scores of --before; null = none was given")
    tight_loops: int | None = Field(default=None, description="texts that end in a tight loop; null = skipped")
    repetition: Repetition | None = Field(default=None, description="the texts measured; null = skipped")
    exact_repetition: Repetition | None = Field(
        default=None, description="those of exact attention; null = not decoded"
    )
    before_repetition: Repetition | None = Field(default=None, description="those of --before; null = none was given")
    prompts: list[PromptVerdict] = Field(default=[], description="one entry a prompt")
    memory: MemoryInfo
    warnings: list[str] = Field(default=[], description="what a user should know")
