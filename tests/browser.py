"""A headless Chromium, if this machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips the test, with the reason, where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox refuses to run as root
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS + ["--no-sandbox"] * is_root)
        yield browser
        browser.close()
