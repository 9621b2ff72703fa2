"""Files that a run reads, and files of others, are neither written, emptied nor deleted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.errors import ConfigError, CortiqError, ResourceError
from cortiq_fcd.events import DoneEvent, Event, WarningEvent
from cortiq_fcd.stages import estimate, pipeline, provenance
from cortiq_fcd.stages.checkpoint import Checkpoints
from cortiq_fcd.stages.report import Report
from tests.fixtures import tiny_tokenizer, write_arrays
from tests.stages.test_pipeline import MODEL, furnished, polished_by, settings

SHORT: dict[str, Any] = {"train_steps": 1, "gate_enabled": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnished(tmp_path)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, out: str = "out.cmf", protected: tuple[Path, ...] = (), **changes: Any) -> str:
    before = contents(folder)
    with pytest.raises(ConfigError) as caught:
        pipeline.run(folder / "in.cmf", folder / out, settings(folder, **SHORT, **changes), protected=protected)
    assert contents(folder) == before
    return caught.value.message


# Inputs


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["my.toml", "tokenizer.json", "in.cmf", "train.txt", "val.txt"])
def test_neither_out_nor_report_is_a_file_that_is_read(name: str, force: bool, folder: Path) -> None:
    (folder / "my.toml").write_text("")
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer())
    (folder / "link").symlink_to(name)
    mine = (folder / "my.toml",)
    for place in (name, "link"):
        assert "same file" in refused(folder, place, mine, output_force=force)
        assert "same file" in refused(folder, protected=mine, output_report=folder / place, output_force=force)


def test_a_foreign_file_is_no_place_for_the_report_without_force(folder: Path) -> None:
    foreign = folder / "foreign.json"
    for text in ("dear", "[]", '{"schema": "another/1"}', '{"schema": 3}'):
        foreign.write_text(text)
        assert "exists" in refused(folder, output_report=foreign)
    polished_by(folder, **SHORT, output_report=foreign, output_force=True)
    again = polished_by(folder, **SHORT, output_report=foreign, output_force=True)
    (folder / "out.cmf").unlink()
    assert polished_by(folder, **SHORT, output_report=foreign).outcome == again.outcome  # a report by now


# Places of ours


@pytest.mark.parametrize(
    "name",
    [
        "out.cmf.partial",
        "out.cmf.partial/report.json",
        "out.cmf.partial/lock",
        ".out.cmf.partial.finished",
        ".out.cmf.0123456789abcdef.partial",
        ".out.cmf.converted.cmf",
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_the_report_is_none_of_our_temporary_files(name: str, there: bool, folder: Path) -> None:
    if there:
        (folder / "out.cmf.partial").mkdir()
    assert "temporary" in refused(folder, output_report=folder / name, output_force=True)


@pytest.mark.parametrize("section", ["corpus_train", "corpus_val", "train_teacher"])
@pytest.mark.parametrize("partial", ["out.cmf.partial", ".out.cmf.partial.finished"])
def test_no_input_is_where_files_are_removed(section: str, partial: str, folder: Path) -> None:
    inside = folder / partial / "checkpoint-000001.json"
    inside.parent.mkdir()
    inside.write_bytes((folder / "train.txt").read_bytes())
    (folder / "link").symlink_to(inside)
    for path in (inside, folder / "link"):
        changes: dict[str, Any] = {section: path}
        assert "inside" in refused(folder, **changes)


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "in.cmf")


def hard_link(path: Path) -> None:
    os.link(path.parent.parent / "in.cmf", path)


def text(path: Path) -> None:
    path.write_text("dear")


@pytest.mark.parametrize("name", ["lock", "out.json"])
@pytest.mark.parametrize("make", [link, hard_link, text, Path.mkdir, os.mkfifo])
def test_what_stands_in_the_place_of_our_files(make: Callable[[Path], None], name: str, folder: Path) -> None:
    (folder / "out.cmf.partial").mkdir()
    make(folder / "out.cmf.partial" / name)
    assert name in refused(folder)
    assert os.path.lexists(folder / "out.cmf.partial" / name)


@pytest.mark.parametrize("make", [link, os.mkfifo])
def test_a_lock_that_appears_after_the_checks(make: Callable[[Path], None], folder: Path) -> None:
    checkpoints = Checkpoints(folder / "out.cmf", {})
    checkpoints.folder.mkdir()
    make(checkpoints.folder / "lock")
    before = contents(folder)
    with pytest.raises(CortiqError), checkpoints.at_work():
        pass
    assert contents(folder) == before


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_stands_in_the_folders_place(kind: str, folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    partial = folder / "out.cmf.partial"
    partial.write_text("dear") if kind == "file" else partial.symlink_to("elsewhere" if kind == "link" else "nowhere")
    assert "no directory" in refused(folder)


def test_files_of_others_with_our_names_stay(folder: Path) -> None:
    partial = folder / "out.cmf.partial"
    partial.mkdir()
    names = [f"checkpoint-00000{i}.{kind}" for i in (1, 2, 3, 4) for kind in ("json", "safetensors")]
    for name in [*names, ".mine.0123456789abcdef.partial"]:
        (partial / name).write_text("dear")
    os.mkfifo(partial / "checkpoint-000009.json")
    (partial / "checkpoint-000010.json").symlink_to("../in.cmf")
    (partial / "checkpoint-000005.safetensors").write_text("dear")
    before = contents(partial)
    events: list[Event] = []
    polished_by(folder, events.append, gate_enabled=False)
    assert contents(partial) == before
    assert any("not this program's" in event.message for event in events if isinstance(event, WarningEvent))
    assert {path.name for path in partial.iterdir()} >= {"checkpoint-000009.json", "checkpoint-000010.json"}


# Names and faults after OUT is written


@pytest.mark.skipif(os.name == "nt", reason="names are not bytes there")
def test_a_name_that_is_not_utf8(folder: Path) -> None:
    out = folder / os.fsdecode(b"o\xff.cmf")
    train = (folder / "train.txt").rename(folder / os.fsdecode(b"t\xfe.txt"))
    teacher = folder / os.fsdecode(b"teach\xfd.cmf")
    write_arrays(teacher, MODEL.header(), MODEL.arrays(), tokenizer=tiny_tokenizer())
    events: list[Event] = []
    config = settings(folder, **SHORT, corpus_train=train, train_teacher=teacher)
    pipeline.run(folder / "in.cmf", out, config, events.append)
    report = Report.read(out.with_name(out.name + ".report.json"))
    assert report.output.path.endswith("o\\xff.cmf")
    assert isinstance(events[-1], DoneEvent)
    assert all(json.loads(event.model_dump_json()) for event in events)


def test_a_report_that_cant_be_written_is_told_with_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ResourceError("no space left")

    monkeypatch.setattr(provenance, "write_report", full)
    with pytest.raises(ResourceError) as caught:
        polished_by(folder, **SHORT)
    assert f"{folder / 'out.cmf'} itself is written" in caught.value.message
    assert (folder / "out.cmf").exists()


# Absurd values


def test_eos_ids_that_no_token_has(folder: Path) -> None:
    header = MODEL.header() | {"tokenizer_config": {"eos_token_ids": [10**30, -1, 3]}}
    write_arrays(folder / "in.cmf", header, MODEL.arrays(), tokenizer=tiny_tokenizer(), force=True)
    events: list[Event] = []
    polished_by(folder, events.append, train_steps=1)
    assert any("eos_token_ids" in event.message for event in events if isinstance(event, WarningEvent))


@pytest.mark.parametrize(("field", "value"), [("lr", 1001.0), ("batch", 2**20 + 1), ("seq", 2**20 + 1)])
def test_bounds_of_the_recipe(field: str, value: float, folder: Path) -> None:
    with pytest.raises(ValueError, match="less than or equal"):
        settings(folder, **{f"train_{field}": value})


def test_a_batch_that_no_memory_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "available_bytes", lambda: 1 << 29)
    np.save(folder / "ids.npy", np.arange(200_000) % MODEL.V)
    before = contents(folder)
    with pytest.raises(ResourceError, match="of memory"):
        polished_by(folder, **SHORT, train_batch=100_000, corpus_train=folder / "ids.npy")
    assert contents(folder) == before
