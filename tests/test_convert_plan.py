"""`convert --dry-run`, and what `convert --polish` refuses before it converts anything."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cortiq_fcd.io import atomic
from cortiq_fcd.io.hf.encoding import peak_bytes, weights_or_payload
from cortiq_fcd.io.hf.importing import Import
from cortiq_fcd.io.hf.names import Placed
from cortiq_fcd.io.hf.quantization import QUANTS
from cortiq_fcd.io.hf.safetensors import read_directory
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import create_model
from cortiq_fcd.stages import pipeline
from tests.command_line import Run, leftovers
from tests.io.small_hf_model import LLAMA, write_directory
from tests.test_convert import O1, POLISH
from tests.tiny_model import write_tiny_model


@pytest.fixture
def never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Import, "write", lambda *_, **__: pytest.fail("tensors were converted"))


# What is refused


@pytest.mark.usefixtures("never_written")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--corpus", "no.txt"], 5, "no.txt: can't be read"),
        (["--val-corpus", "latin.txt"], 5, "not UTF-8"),
        (["--corpus", "short.npy"], 5, "too short"),
        (["--corpus", "words.txt"], 5, "no tokenizer"),
        (["--corpus", "."], 5, "got a directory"),
        (["--o1", "2"], 2, "layers 0 to 1"),
        (["--o1", "1,x"], 2, "not a set of layers"),
        (["--device", "abacus"], 2, "abacus"),
        (["--device", "cuda:99"], 2, "cuda:99"),
        (["--teacher", "no.cmf"], 2, "no.cmf"),
        (["--teacher", "other.cmf"], 2, "hidden size"),
        (["--report", "settings.toml", "--force"], 2, "same file"),
        (["--report", "hf/config.json", "--force"], 2, "same file"),
        (["--report", "train.npy", "--force"], 2, "same file"),
        (["--report", "out.cmf"], 2, "same file"),
        (["--report", "out.cmf.converted.cmf", "--keep-intermediate"], 2, "same file"),
        (["--report", ".out.cmf.converted.cmf"], 2, "temporary"),
        (["--require-pass"], 10, "--require-pass"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_the_conversion(
    run: Run,
    model_dir: Path,
    tmp_path: Path,
    ids: list[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    code: int,
    words: str,
    dry: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("words.txt").write_text("some words")
    np.save("short.npy", np.arange(8))
    Path("settings.toml").write_text("[train]\nsteps = 2\n")
    write_tiny_model(Path("other.cmf"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ran = run("convert", model_dir, "out.cmf", *POLISH, *ids, "--config", "settings.toml", *options, *dry)
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert words in ran.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("never_written")
def test_out_is_not_the_file_of_settings(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[train]\nsteps = 2\n")
    ran = run("convert", model_dir, settings, *POLISH, *ids, "--config", settings, "--force")
    assert ran.code == 2
    assert "same file" in ran.err


@pytest.mark.usefixtures("never_written")
def test_resume_without_a_checkpoint(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--resume")
    assert ran.code == 2
    assert "there is none" in ran.err


@pytest.mark.usefixtures("never_written")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_a_step_that_can_not_fit_is_not_tried_out(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch, dry: list[str]
) -> None:
    monkeypatch.setattr("cortiq_fcd.stages.estimate.available_bytes", lambda: 1_000_000)
    monkeypatch.setattr("cortiq_fcd.stages.estimate.measure", lambda *_: pytest.fail("it was tried out"))
    large = ["--batch", "300", "--seq", "256"]
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, *large, *dry)
    assert (ran.code, ran.out) == (6, "")
    assert "a step of --batch 300" in ran.err


@pytest.mark.usefixtures("never_written")
def test_both_files_must_fit(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--dry-run", "--json").document
    needed = told["output"]["bytes"] + told["polish"]["disk"]["out"]
    usage = type(atomic.shutil.disk_usage(tmp_path))(10**9, 0, needed - 1)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids)
    assert ran.code == 6
    assert f"needs {needed:,} bytes" in ran.err


# What is told


@pytest.mark.parametrize("quant", QUANTS)
def test_a_dry_run_tells_what_is_written(run: Run, tmp_path: Path, quant: str) -> None:
    words = json.dumps({"version": "1.0"}).encode()
    folder, out = write_directory(tmp_path / "hf", LLAMA, tokenizer=words), tmp_path / "out.cmf"
    told = run("convert", folder, out, "--quant", quant, *O1, "--dry-run", "--json").document
    assert not out.exists()
    assert leftovers(tmp_path) == []
    done = run("convert", folder, out, "--quant", quant, *O1, "--json").document
    least, most = told["output"]["bytes"], told["output"]["most_bytes"]
    assert least <= out.stat().st_size <= most
    assert (least == most) == (quant != "vbit")
    assert {label: entry["tensors"] for label, entry in told["tensors"].items()} == done["tensors"]
    for key in ("source", "quant", "fallbacks", "o1_attn", "notes"):
        assert told[key] == done[key]
    with open_model(out) as model:
        for label, entry in told["tensors"].items():
            stored = sum(record.nbytes for record in model.tensors.values() if record.dtype.label == label)
            assert entry["bytes"] <= stored <= entry["most_bytes"]


def test_a_dry_run_for_people(run: Run, tmp_path: Path, ids: list[str]) -> None:
    folder, out = write_directory(tmp_path / "hf", {**LLAMA, "intermediate_size": 100}), tmp_path / "out.cmf"
    ran = run("convert", folder, out, "--quant", "vbit", *POLISH, *ids, "--dry-run")
    assert ran.code == 0, ran.err
    assert "instead of vbit_ro" in ran.err
    for words in ("3 tensors", "converted file", "memory, at most", "then the polish", "layers trained       2: 0-1"):
        assert words in ran.out
    assert not out.exists()


def test_its_forecast_of_the_polish_is_that_of_the_converted_file(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str]
) -> None:
    out, converted = tmp_path / "out.cmf", tmp_path / "converted.cmf"
    planned = run("convert", model_dir, out, *POLISH, *ids, "--dry-run", "--json").document["polish"]
    assert run("convert", model_dir, converted, *O1).code == 0
    known = run("polish", converted, out, *POLISH[1:], *ids, "--dry-run", "--json").document

    def certain(forecast: dict[str, Any]) -> list[Any]:
        memory, disk = forecast["memory"], forecast["disk"]
        parts = ("frozen", "teacher", "masters", "gradient", "moments", "best", "logits", "checkpoint_copy")
        return [forecast["layers"], forecast["trainable_params"], disk["out"], *(memory[part] for part in parts)]

    assert certain(planned) == certain(known)


@pytest.mark.parametrize("polish", [False, True])
def test_a_dry_run_warns_of_an_out_that_exists(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str], polish: bool
) -> None:
    """As that of `polish` does, and -q doesn't hide it."""
    out = tmp_path / "out.cmf"
    out.write_bytes(b"old")
    (tmp_path / "out.cmf.converted.cmf").write_bytes(b"old")
    flags = [*POLISH, *ids, "--keep-intermediate"] if polish else O1
    ran = run("convert", model_dir, out, *flags, "--dry-run", "-q")
    assert ran.code == 0, ran.err
    assert ran.err.count("exists already: the run needs --force") == (2 if polish else 1), ran.err
    assert run("convert", model_dir, out, *flags).code == 2
    forced = run("convert", model_dir, out, *flags, "--dry-run", "-q", "--force")
    assert (forced.code, "exists already" in forced.err) == (0, False)
    assert out.read_bytes() == b"old"


def test_a_forecast_of_the_conversion_leaves_out_what_the_polishs_took(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = [100]

    def forecast(*_: object, **__: object) -> object:
        in_use[0] = 900
        return real(*_, **__)

    real = pipeline.forecast
    monkeypatch.setattr(pipeline, "forecast", forecast)
    monkeypatch.setattr("cortiq_fcd.stages.capacity.resident_bytes", lambda: in_use[0])
    told = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--dry-run", "--json").document
    assert (told["memory"]["in_use"], in_use) == (100, [900])


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", [(700, 1024), (2200, 2048)], ids=["whole", "by rows"])
def test_no_tensor_takes_more_memory_than_told(quant: str, shape: tuple[int, int], tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    save_file({"a": weights}, tmp_path / "a.safetensors")
    tensor = Placed("a", "matrix", shape, read_directory(tmp_path / "a.safetensors")["a"])
    del weights
    tracemalloc.start()
    create_model(
        tmp_path / "a.cmf",
        header={"format": "cmf", "version": 2, "arch": {}},
        tensors=[("a", QUANTS[quant], shape, lambda: weights_or_payload(tensor, QUANTS[quant]))],
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with open_model(tmp_path / "a.cmf") as model:
        payload = model.tensors["a"].nbytes
    assert peak <= peak_bytes(tensor, QUANTS[quant], payload)
    assert peak_bytes(tensor, QUANTS[quant], payload) < 16 * math.prod(shape) + 2**26
