"""Every test of the model runs on poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tests.fixtures  # noqa: F401  (one thread, repeatable examples)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty comes filled with NaN, so an entry that nothing writes can't pass for a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
