"""`cortiq-fcd demo` with a model that takes no time."""

from __future__ import annotations

import signal
from importlib.resources import files
from pathlib import Path

import pytest

from cortiq_fcd.cli import exits, tour
from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.stages.report import Report
from tests.reports import IDENTITY, PASSED_GATE, REJECTED_GATE, SKIPPED_GATE, sample_report
from tests.tiny_model import write_ids, write_tiny_model

SETTINGS = """
[corpus]
train = "{train}"
[o1]
m = 4
w = 2
sink = 0
[train]
seq = 32
steps = 2
[compute]
threads = 1
"""


@pytest.fixture(params=[2000])
def small_demo(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's data in miniature; the parameter is the number of training tokens, a tenth of which validate."""
    data = tmp_path / "package" / "data"
    data.mkdir(parents=True)
    write_tiny_model(data / "demo.cmf")
    train = write_ids(tmp_path / "train.npy", request.param)
    (data / "demo.toml").write_text(SETTINGS.format(train=train))
    monkeypatch.setattr(tour, "files", lambda package: tmp_path / "package")


def demo(folder: Path) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        return exits.run(["demo", str(folder), "--progress", "none"])
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("small_demo")
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "demo"
    assert demo(folder) == 0
    shown = capsys.readouterr().out
    report = Report.read(folder / "polished.cmf.report.json")
    for words in ("small language model", "Perplexity (lower is better)", "served positions", "How to read this."):
        assert words in " ".join(shown.split())
    assert " ".join(tour.VERDICTS[tour.verdict_of(report)].split())[:40] in " ".join(shown.split())
    assert f"cortiq-fcd report {folder}/polished.cmf\n" in shown
    assert shown.rstrip().endswith(f"cortiq-fcd report {folder}/polished.cmf --html {folder}/report.html")
    assert "\x1b" not in shown
    assert demo(folder) == 0, "a second run replaces its own output"


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("small_demo", [10_000], indirect=True)
def test_demo_shows_what_the_gate_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert demo(folder) == 0
    shown = " ".join(capsys.readouterr().out.split())
    gated = Report.read(folder / "polished.cmf.report.json")
    ungated = Report.read(folder / "ungated.cmf.report.json")
    assert tour.verdict_of(gated) == "rejected", "random weights loop"
    assert (ungated.outcome, ungated.gate.reason) == ("polished", "switched off with --no-gate")
    assert "The gate rejected every checkpoint" in shown
    assert f"{folder}/ungated.cmf holds what perplexity alone chose" in shown


@pytest.mark.usefixtures("small_demo")
def test_demo_leaves_other_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.cmf").write_bytes(b"mine")
    assert demo(tmp_path) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert (tmp_path / "demo.cmf").read_bytes() == b"mine"


def test_the_verdict_is_the_reports() -> None:
    assert tour.verdict_of(sample_report(gate=PASSED_GATE)) == "chosen"
    assert tour.verdict_of(sample_report(gate=SKIPPED_GATE)) == "skipped"
    assert tour.verdict_of(sample_report(**IDENTITY, gate=REJECTED_GATE)) == "rejected"
    kept = PASSED_GATE.model_copy(update={"chosen": 0})
    assert tour.verdict_of(sample_report(**IDENTITY, gate=kept)) == "nothing better"


def test_built_in_model_and_settings() -> None:
    data = files("cortiq_fcd") / "data"
    settings = resolve({}, Path(str(data / "demo.toml")))
    assert settings.train.steps <= 200, "the demo takes minutes, not hours"
    with open_model(str(data / "demo.cmf")) as model:
        assert model.bytes_total <= 3_000_000
