"""What every test can rely on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# A shell that starts the tests in the background makes them ignore SIGINT, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As the command line does: threads that spin while they wait take the processor from whatever else the machine does.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """Products are f32 in every test, whatever a polish before it has chosen for the process."""
    yield
    if products := sys.modules.get("cortiq_fcd.kernels.products"):
        products.set_precision("f32")
