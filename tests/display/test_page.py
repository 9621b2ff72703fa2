"""The HTML report: complete, self-contained, and deaf to what texts and names would like to be."""

from __future__ import annotations

import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortiq_fcd.display.page import MARK, report_page
from cortiq_fcd.display.report_view import show_report
from cortiq_fcd.stages.report import KlInfo, PplInfo, Repetition, Report
from tests.reports import IDENTITY, REJECTED_GATE, SKIPPED_GATE, sample_report

HOSTILE = "\"'><script>alert(1)</script><img src=http://x.example/ onerror=alert(1)>{{ 7*7 }}&lt;</style>\x1b[2J\u202e"


class _Structure(HTMLParser):
    """Tags with their attributes' names, in order, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def with_text(value: Any, text: str) -> Any:
    """A copy of JSON data with another text in place of every text that a user, a file or a model gave."""
    kept = {"schema", "outcome", "status", "profile", "save_dtype", "layers"}
    kept |= {"recipe", "schedule", "clip", "sampling", "seals"}
    if isinstance(value, dict):
        return {
            key: inner
            if key in kept and not isinstance(inner, dict)
            else dict.fromkeys([text], 1.0)
            if key == "timing"
            else with_text(inner, text)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [with_text(item, text) for item in value]
    return text if isinstance(value, str) else value


def page_with(text: str, **changes: Any) -> str:
    data = with_text(sample_report(**changes).model_dump(mode="json", by_alias=True), text)
    return report_page(Report.model_validate(data))


def test_hostile_text_stays_text() -> None:
    hostile, harmless = _Structure(page_with(HOSTILE)), _Structure(page_with("x" * len(HOSTILE)))
    assert hostile.tags == harmless.tags
    assert hostile.links == ["data:,"]
    assert hostile.words.count("<script>alert(1)</script>") >= 10
    assert "{{ 7*7 }}" in hostile.words
    assert "\x1b" not in hostile.words
    assert "\u202e" not in hostile.words
    assert not [name for _, names in hostile.tags for name in names if name.startswith("on")]


def test_one_file_without_network_or_script() -> None:
    page = report_page(sample_report())
    assert not re.search(r"https?:|@import|url[(]|<script", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("changes", "there", "missing"),
    [
        ({}, "outcome warnings perplexity gate texts curves time made hashes", ""),
        (IDENTITY | {"gate": REJECTED_GATE}, "perplexity gate texts curves", ""),
        ({"gate": SKIPPED_GATE}, "perplexity gate curves", "texts"),
        (
            {"ppl": PplInfo(), "kl_served": KlInfo(), "losses": [], "evals": [], "timing": {}, "warnings": []},
            "outcome perplexity gate made hashes",
            "curves time warnings",
        ),
    ],
    ids=["polished", "identity", "gate skipped", "nothing measured"],
)
def test_sections(changes: dict[str, Any], there: str, missing: str) -> None:
    page = report_page(sample_report(**changes))
    ids = re.findall(r'<section[^>]* id="(\w+)"', page)
    assert set(there.split()) <= set(ids)
    assert not set(missing.split()) & set(ids)


def test_what_repeats_is_marked() -> None:
    page = report_page(sample_report())
    assert "and then she went away<mark> and then she went away</mark>" in page
    assert "step 40 (chosen)" in page
    assert "(rejected)" in report_page(sample_report(**IDENTITY, gate=REJECTED_GATE))


def test_hashes_recipe_and_reason_are_there() -> None:
    report = sample_report(gate=SKIPPED_GATE)
    words = _Structure(report_page(report)).words
    for expected in (report.source.dir_hash, report.output.dir_hash, report.corpus.train_sha256, "lr 0.0003"):
        assert expected in words
    assert SKIPPED_GATE.reason in words


def test_one_text_has_one_hash() -> None:
    """Which is told apart from a validation text that was trained on."""
    apart = sample_report().corpus
    tenth = apart.model_copy(
        update={"val_sha256": apart.train_sha256, "source": "train: built-in; val: its last 100000 tokens"}
    )
    twice = tenth.model_copy(update={"source": "train: a.txt; val: a.txt"})
    for corpus, rows, words in ((apart, 2, "validation text"), (tenth, 1, "last tenth"), (twice, 1, "and validation")):
        section = report_page(sample_report(corpus=corpus)).split('id="hashes"')[1]
        assert section.count("SHA-256") == rows
        assert words in section
        assert ("never trained on" in section) == (corpus is tenth)


def test_a_star_is_not_explained_where_none_is_drawn() -> None:
    assert "* =" not in report_page(sample_report())


def test_the_footers_command_finds_the_file() -> None:
    output = sample_report().output.model_copy(update={"path": "some where/out.cmf"})
    assert "report &#39;some where/out.cmf&#39; --json" in report_page(sample_report(output=output))


def test_plots_survive_flat_and_missing_values() -> None:
    report = sample_report()
    flat = [loss.model_copy(update={"ce": 1.0, "kl": 0.0, "grad_norm": None}) for loss in report.losses]
    page = report_page(sample_report(losses=flat, evals=report.evals[:1]))
    assert page.count("<svg") == 2
    assert not re.search(r"\b(nan|inf)\b", page.split("<main>")[1])


def test_a_long_run_makes_no_long_page() -> None:
    losses = [sample_report().losses[i % 60].model_copy(update={"step": i + 1}) for i in range(100_000)]
    assert len(report_page(sample_report(losses=losses))) < 200_000


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    from cortiq_fcd.cli.reading import write_page
    from cortiq_fcd.errors import ConfigError

    page = tmp_path / "report.html"
    write_page(sample_report(), page)
    write_page(sample_report(), page)  # a page of ours may be replaced
    assert page.read_text(encoding="utf-8") == report_page(sample_report())
    other = tmp_path / "out.cmf"
    other.write_bytes(b"mine")
    for path in (other, tmp_path):
        with pytest.raises(ConfigError, match="--html"):
            write_page(sample_report(), path)
    for folder in (tmp_path / "missing", other):
        with pytest.raises(ConfigError, match="there is no directory"):
            write_page(sample_report(), folder / "report.html")
    assert other.read_bytes() == b"mine"


def test_a_link_to_a_page_stays_a_link(tmp_path: Path) -> None:
    from cortiq_fcd.cli.reading import write_page

    page, link = tmp_path / "report.html", tmp_path / "latest.html"
    write_page(sample_report(), page)
    page.write_text(MARK + "old")
    link.symlink_to(page)
    write_page(sample_report(), link)
    assert link.is_symlink()
    assert page.read_text(encoding="utf-8") == report_page(sample_report())


@pytest.mark.parametrize("name", ["missing/report.html", "pipe", "in.json/report.html"])
def test_places_where_no_page_can_be(name: str, tmp_path: Path) -> None:
    from cortiq_fcd.cli.reading import write_page
    from cortiq_fcd.errors import ConfigError

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "in.json").write_text("{}")
    with pytest.raises(ConfigError):
        write_page(sample_report(), tmp_path / name)


def test_numbers_of_a_damaged_report_are_drawn_without_a_fault() -> None:
    losses = [loss.model_copy(update={"step": 2**60 + i}) for i, loss in enumerate(sample_report().losses)]
    timing = {"polish": 1e-9, "polish.gate": 1e300, "report": -1.0, "": 2.0}
    silent = Repetition(texts=[], distinct_1=None, distinct_2=None, distinct_3=None)
    gate = sample_report().gate.model_copy(update={"teacher_repetition": silent})
    changed = sample_report(losses=losses, timing=timing, gate=gate)
    assert report_page(changed).count("<svg") > 1
    console = Console(file=io.StringIO(), width=80)
    show_report(changed, console)
    assert len(console.file.getvalue()) < 50_000  # type: ignore[attr-defined]
