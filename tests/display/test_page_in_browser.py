"""The HTML report in a real browser, on a phone and on a desk. Skipped where no Chromium is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd.display.page import report_page
from tests.browser import chromium
from tests.reports import IDENTITY, PASSED_GATE, REJECTED_GATE, TEXTS, sample_report

LONG = "a_path_without_any_place_to_break_it/" * 8
STRICT = PASSED_GATE.model_copy(
    update={
        "baseline": [0.1, 0.3] * 8,
        "texts": TEXTS.model_copy(update={"prompts": TEXTS.prompts * 8}),
        "profile": "strict",
    }
)
REPORTS: dict[str, dict[str, Any]] = {
    "polished": {},
    "rejected": IDENTITY | {"gate": REJECTED_GATE},
    "strict": {"gate": STRICT},
    "long names": {
        "source": sample_report().source.model_copy(update={"path": LONG}),
        "output": sample_report().output.model_copy(update={"path": LONG.replace("/", "_")}),
        "warnings": [LONG * 3],
    },
}
MEASURE = """() => ({
  overflow: document.documentElement.scrollWidth - innerWidth,
  sections: [...document.querySelectorAll('section')].map(s => [s.id, s.getBoundingClientRect().width,
                                                                s.getBoundingClientRect().height]),
  cut: [...document.querySelectorAll('h1, h2, p, dd, li, figure, .tile')].filter(e => {
    const box = e.getBoundingClientRect(); return box.left < -0.5 || box.right > innerWidth + 0.5 }).length,
  paper: getComputedStyle(document.body).backgroundColor,
  marks: document.querySelectorAll('mark').length,
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("changes", REPORTS.values(), ids=REPORTS.keys())
def test_fits_and_loads_nothing_else(browser: Any, tmp_path: Path, changes: dict[str, Any], width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(sample_report(**changes)), encoding="utf-8")
    papers = []
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(path.as_uri())
        found = page.evaluate(MEASURE)
        page.close()
        assert said == []
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
        assert found["overflow"] <= 0
        assert found["cut"] == 0
        assert found["marks"] > 0
        assert {"outcome", "perplexity", "gate", "texts", "curves", "time", "made", "hashes"} <= {
            name for name, wide, high in found["sections"] if wide > 300 and high > 40
        }
        papers.append(found["paper"])
    assert papers[0] != papers[1], "light and dark"
