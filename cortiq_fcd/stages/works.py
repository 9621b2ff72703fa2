"""The works of a polish, as they are tried out on miniatures: a step, a validation, decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cortiq_fcd.kernels.ce_kl import nll_sum
from cortiq_fcd.model.conversion import Conversion
from cortiq_fcd.model.decode import Decoder
from cortiq_fcd.model.elements import Elements
from cortiq_fcd.model.plan import ModelPlan
from cortiq_fcd.model.replica import Replica, hidden_states, loss_and_gradient
from cortiq_fcd.stages.config import TrainConfig
from cortiq_fcd.stages.miniature import Miniatures, Work
from cortiq_fcd.stages.sharding import UNDIVIDED, Sharding


@dataclass(frozen=True)
class Sizes:
    """What the cost of a polish depends on."""

    plan: ModelPlan
    teacher_plan: ModelPlan | None
    conversion: Conversion
    train: TrainConfig
    prompts: int  # of the gate; 0: it does not run
    prompt_tokens: int
    new_tokens: int
    unpack_bytes: int = 0  # most that decoding a tensor takes beside its values
    sharding: Sharding = UNDIVIDED  # `train` is one process's share

    @property
    def batch(self) -> int:
        """Windows of a step, on all processes."""
        return self.train.batch * self.sharding.world

    @property
    def trained(self) -> int:
        """Weights that are trained."""
        names = [name for i in self.conversion.layers for name in self.plan.layers[i].trainable]
        return sum(math.prod(self.plan.shapes[name]) for name in names)


def miniatures(sizes: Sizes, device: torch.device, *, blank: bool) -> Miniatures:
    """Miniatures of the model."""
    return Miniatures(sizes.plan, sizes.teacher_plan, sizes.conversion, device, blank)


def _ids(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(batch, tokens, dtype=torch.int64, device=device)


def step(train: TrainConfig, device: torch.device) -> Work:
    """Loss and gradient."""
    ids = _ids(train.batch, train.seq, device)
    elements = Elements(temperature=train.temperature, match=train.match)
    return lambda replica: loss_and_gradient(replica, ids, ids, train.kl, elements=elements)


def decode(batch: int, prompt: int, tokens: int, steps: int) -> Work:
    """A prompt pass, and so many more tokens."""

    def work(replica: Replica) -> None:
        device = replica.weights.embed.device
        decoder = Decoder(replica, student=True, served=True, capacity=tokens)
        decoder.prompt(_ids(batch, prompt, device))
        for _ in range(steps):
            decoder.step(_ids(batch, 1, device)[:, 0])

    return work


def validate(train: TrainConfig, replica: Replica) -> None:
    """One batch of windows, as `perplexity_at` runs them."""
    ids = _ids(train.batch, train.seq, replica.weights.embed.device)
    hidden = hidden_states(replica, ids, student=True, seal=replica.conversion.seal)
    nll_sum(hidden, replica.weights.head, ids.reshape(-1), softcap=replica.weights.plan.logit_softcap)
