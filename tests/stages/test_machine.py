from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of making, filling and freeing a 64 MB tensor the tenth time: 16384 pages of 4 KB.
FAULTS = """
import resource, sys, torch
from cortiq_fcd.stages.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_freed_memory_serves_the_next_tensor() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True, text=True).stdout)
        for how in ("keep", "default")
    }
    assert faults["keep"] < 100 < faults["default"], faults
