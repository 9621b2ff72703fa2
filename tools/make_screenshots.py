"""Makes the pictures of docs/images: polishes the demo model, and pictures the live display and the HTML report.

    python tools/make_screenshots.py docs/images

Needs a Chromium on PATH and takes a minute or two. Times and memory in the pictures are those of the machine it runs
on.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.display.live import LiveDisplay
from cortiq_fcd.display.page import report_page
from cortiq_fcd.events import Event, StepEvent
from cortiq_fcd.stages import pipeline
from cortiq_fcd.stages.report import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COLUMNS = 96
PICTURED_STEP = 47
TITLE = "cortiq-fcd polish demo/demo.cmf demo/polished.cmf --config demo/demo.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description="make the pictures of the documents")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        report = polish_pictured(Path(work), folder / "live.svg")
        page = Path(work) / "report.html"
        page.write_text(report_page(report), encoding="utf-8")
        picture_page(page, folder, browser)


def polish_pictured(work: Path, svg: Path) -> Report:
    """Polish the demo model; the live display as it is at one step goes into `svg`."""
    data = Path(str(files("cortiq_fcd") / "data"))
    # Named as a user sees them, so that no path of this machine is in a picture.
    demo = work / "demo"
    demo.mkdir()
    shutil.copyfile(data / "demo.cmf", demo / "demo.cmf")
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=COLUMNS))
    display.live.auto_refresh = False
    display.open()

    def listener(event: Event) -> None:
        display(event)
        if isinstance(event, StepEvent) and event.step == PICTURED_STEP:
            console = Console(file=io.StringIO(), record=True, force_terminal=True, width=COLUMNS)
            console.print(display.render())
            text = console.export_svg(title=TITLE, theme=DIMMED_MONOKAI)
            # Fonts of the network: a picture that is looked at must not fetch any.
            svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL), encoding="utf-8")

    settings = resolve({}, data / "demo.toml")
    report = pipeline.run(demo / "demo.cmf", demo / "polished.cmf", settings, listener)
    source = report.source.model_copy(update={"path": "demo/demo.cmf"})
    output = report.output.model_copy(update={"path": "demo/polished.cmf"})
    return report.model_copy(update={"source": source, "output": output})


def picture_page(page: Path, folder: Path, browser: str) -> None:
    """The page on a desk, light, and on a phone, dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for name, width, height, scheme in (("report", 1100, 1500, "light"), ("report-phone", 390, 1500, "dark")):
            shown = started.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            shown.goto(page.as_uri())
            shown.screenshot(path=folder / f"{name}.png")
        started.close()


if __name__ == "__main__":
    main()
