"""Every kernel test runs on one thread and on poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty comes filled with NaN, so an entry that a kernel forgets to write can't pass for a number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
