"""What every test can rely on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import run  # noqa: F401  a fixture
from tests.io.small_hf_model import write_directory
from tests.tiny_model import write_ids

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


@pytest.fixture
def ids(tmp_path: Path) -> list[str]:
    """Options that name training and validation ids for the tiny models."""
    train, val = write_ids(tmp_path / "train.npy", 2000), write_ids(tmp_path / "val.npy", 400, seed=1)
    return ["--corpus", str(train), "--val-corpus", str(val)]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A small HuggingFace directory without a tokenizer."""
    return write_directory(tmp_path / "hf")
