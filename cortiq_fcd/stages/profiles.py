"""The gate's profiles: how many prompts, how long, and how strictly their continuations are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cortiq_fcd.stages.config import GateProfile
from cortiq_fcd.stages.repetition import NGRAM


@dataclass(frozen=True)
class Profile:
    """Prompts of `prompt_tokens`, each continued for `new_tokens`.

    `strict`: the prompts lie beside every validation window and one another, and a text that ends in a tight loop fails
    whatever its score.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    strict: bool

    @property
    def granularity(self) -> float:
        """The step between two loop scores of whole continuations: 1 / number of 4-grams."""
        return 1 / (self.new_tokens - NGRAM + 1)


PROFILES: Mapping[GateProfile, Profile] = {
    "standard": Profile(3, 400, 60, strict=False),
    "strict": Profile(16, 400, 128, strict=True),
}
