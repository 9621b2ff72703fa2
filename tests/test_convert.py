"""`cortiq convert`, `cortiq-fcd export`, and what the console script hands on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortiq_fcd.cli import exits
from cortiq_fcd.io.hf.safetensors import StoredTensor
from cortiq_fcd.io.reader import open_model
from tests.command_line import Run, leftovers
from tests.io.small_hf_model import LLAMA, llama_arrays, write_directory
from tests.oracles import cmf_reader

ROOT = Path(__file__).resolve().parents[1]
O1 = ["--o1", "all", "--o1-m", "4", "--o1-window", "2", "--o1-sink", "0"]
POLISH = ["--polish", *O1, "--seq", "32", "--steps", "2", "--batch", "1", "--threads", "1", "--progress", "none"]

# convert


def test_a_directory_becomes_a_file(run: Run, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    ran = run("convert", model_dir, out, "--json")
    assert ran.code == 0
    assert "no tokenizer.json" in ran.err
    header, tensors, _ = cmf_reader.read(out)
    arrays = llama_arrays()
    assert tensors.keys() == arrays.keys()
    assert all(np.allclose(tensors[name], array, atol=1e-3) for name, array in arrays.items())
    assert "provenance" not in header
    with open_model(out) as model:
        assert ran.document == {
            "schema": "cortiq-convert/1",
            "source": {"path": str(model_dir), "arch_name": "llama", "layers": 2},
            "output": {"path": str(out), "bytes": out.stat().st_size, "dir_hash": model.dir_hash},
            "quant": "f16",
            "tensors": {"f16": 15, "f32": 5},
            "fallbacks": [],
            "o1_attn": None,
            "notes": [f"{model_dir} has no tokenizer.json: the file will have no tokenizer"],
            "intermediate": None,
            "polish": None,
        }
    assert leftovers(tmp_path) == []


def test_a_file_is_replaced_only_when_asked(run: Run, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    assert run("convert", model_dir, out).out.startswith(f"{out}: ")
    first = out.read_bytes()
    again = run("convert", model_dir, out, "--quant", "q8_row")
    assert (again.code, out.read_bytes()) == (2, first)
    assert "--force" in again.err
    assert run("convert", model_dir, out, "--quant", "q8_row", "--force").code == 0
    assert out.read_bytes() != first
    assert run("convert", model_dir, out, "--force").code == 0
    assert out.read_bytes() == first
    inside = run("convert", model_dir, model_dir / "model.safetensors", "--force")
    assert inside.code == 2
    assert "same file" in inside.err


@pytest.mark.parametrize(("spec", "layers"), [("all", "all"), ("deep1", "deep1"), ("1,0", [0, 1])])
def test_o1_marks_the_file(run: Run, model_dir: Path, tmp_path: Path, spec: str, layers: Any) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", "--o1", spec, "--o1-window", "64", "--json")
    expected = {"layers": layers, "m": 32, "w": 64, "sink": 4}
    assert ran.document["o1_attn"] == expected
    with open_model(tmp_path / "out.cmf") as model:
        assert model.header["provenance"] == {"o1_attn": expected}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--o1", "2"], "layers 0 to 1"),
        (["--o1", "some"], "not a set of layers"),
        (["--o1", "all", "--o1-m", "3"], "--o1-m"),
        (["--o1-m", "8"], "--o1-m needs --o1"),
        (["--steps", "5"], "--steps"),
        (["--gate"], "--gate"),
        (["--keep-intermediate"], "--keep-intermediate"),
        (["--config", "x.toml"], "--config"),
        (["--quant", "q5"], "q5"),
        (["--progress", "loud"], "loud"),
        (["--surprise"], "--surprise"),
    ],
)
def test_options_that_can_not_work(run: Run, model_dir: Path, tmp_path: Path, options: list[str], words: str) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", *options)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert not (tmp_path / "out.cmf").exists()


def test_a_model_that_is_not_supported_leaves_nothing(run: Run, tmp_path: Path) -> None:
    for number, (key, value) in enumerate([("surprise", 1), ("num_key_value_heads", 4), ("hidden_act", "gelu")]):
        folder = write_directory(tmp_path / str(number), {**LLAMA, key: value}, llama_arrays())
        ran = run("convert", folder, tmp_path / "out.cmf")
        assert (ran.code, ran.out) == (4, "")
        assert ("k_proj" if "heads" in key else key) in ran.err
    missing = run("convert", "Org/Name", tmp_path / "out.cmf")
    assert missing.code == 2
    assert "hint: nothing is downloaded" in missing.err
    (tmp_path / "0" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (tmp_path / "0" / "model.safetensors").write_bytes(b"nonsense")
    assert run("convert", tmp_path / "0", tmp_path / "out.cmf").code == 3
    assert not (tmp_path / "out.cmf").exists()
    assert leftovers(tmp_path) == []


def test_fallbacks_are_told(run: Run, tmp_path: Path) -> None:
    config = {**LLAMA, "intermediate_size": 100}
    folder = write_directory(tmp_path / "hf", config)
    ran = run("convert", folder, tmp_path / "out.cmf", "--quant", "vbit", "--json")
    assert ran.document["tensors"] == {"f32": 5, "q8_row": 3, "vbit_ro": 12}
    first = ran.document["fallbacks"][0]
    assert (first["asked"], first["got"]) == ("vbit_ro", "q8_row")
    assert first["tensor"] == "model.layers.0.mlp.down_proj.weight"
    assert ran.err.count("instead of vbit_ro") == 2
    quiet = run("convert", folder, tmp_path / "out.cmf", "--quant", "vbit", "--force", "-q")
    assert quiet.err == ""


def test_notes_are_events_where_a_program_reads_along(run: Run, model_dir: Path, tmp_path: Path) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", "--progress", "json")
    assert json.loads(ran.err)["event"] == "warning"


def test_killed_and_run_again_gives_the_same_bytes(run: Run, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    run("convert", model_dir, out)
    expected = out.read_bytes()
    out.unlink()
    program = (
        "import os, sys\nfrom cortiq_fcd.cli import exits\nfrom cortiq_fcd.io.hf import names\n"
        "read = names.Placed.read\n"
        "names.Placed.read = lambda self: os._exit(9) if self.name == 'model.norm.weight' else read(self)\n"
        "sys.exit(exits.run(sys.argv[1:]))"
    )
    killed = subprocess.run([sys.executable, "-c", program, "convert", model_dir, out], cwd=ROOT, capture_output=True)
    assert killed.returncode == 9
    assert not out.exists()
    assert len(leftovers(tmp_path)) == 1
    assert run("convert", model_dir, out).code == 0
    assert out.read_bytes() == expected
    assert leftovers(tmp_path) == []


def test_one_tensor_in_memory_at_a_time(
    run: Run, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    alive: list[Any] = []
    most = 0

    def counted(self: StoredTensor) -> np.ndarray:
        nonlocal most
        weights = read(self)
        alive.append(weakref.ref(weights if weights.base is None else weights.base))
        most = max(most, sum(reference() is not None for reference in alive))
        return weights

    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", counted)
    assert run("convert", model_dir, tmp_path / "out.cmf", "--quant", "q8_row").code == 0
    assert len(alive) == 20
    assert most == 1


# convert --polish


def test_polish_in_the_same_command(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    out = tmp_path / "out.cmf"
    ran = run("convert", model_dir, out, *POLISH, *ids, "--json")
    assert ran.code == 0, ran.err
    document = ran.document
    report = json.loads(Path(document["polish"]["report"]).read_text("utf-8"))
    assert report["schema"].startswith("cortiq-fcd-report/")
    assert document["polish"]["outcome"] == report["outcome"]
    assert document["output"]["dir_hash"] == report["output"]["dir_hash"]
    assert document["intermediate"] is None
    header, _, _ = cmf_reader.read(out)
    assert document["o1_attn"] == header["provenance"]["o1_attn"] == {"layers": "all", "m": 4, "w": 2, "sink": 0}
    assert header["provenance"]["fcd"]["steps"] == 2
    assert leftovers(tmp_path) == []
    assert "whole report" in run("convert", model_dir, out, *POLISH, *ids, "--force").out


def test_polish_gives_what_two_commands_give(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    out = tmp_path / "out.cmf"
    kept = run("convert", model_dir, out, *POLISH, *ids, "--keep-intermediate", "--json")
    converted = tmp_path / "out.cmf.converted.cmf"
    assert kept.document["intermediate"] == str(converted)
    run("convert", model_dir, tmp_path / "alone.cmf", *O1)
    assert converted.read_bytes() == (tmp_path / "alone.cmf").read_bytes()
    ran = run("polish", converted, tmp_path / "second.cmf", *POLISH[1:], *ids)
    assert ran.code == 0, ran.err
    assert (tmp_path / "second.cmf").read_bytes() == out.read_bytes()
    again = run("convert", model_dir, tmp_path / "third.cmf", *POLISH, *ids, "--keep-intermediate")
    assert again.code == 0  # beside another OUT
    blocked = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--keep-intermediate")
    assert blocked.code == 2


def test_layers_are_chosen_by_the_polish(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--o1", "auto:1", "--json")
    assert ran.code == 0, ran.err
    layers = ran.document["o1_attn"]["layers"]
    assert isinstance(layers, list)
    assert len(layers) == 1
    refused = run("convert", model_dir, tmp_path / "other.cmf", "--o1", "auto:1")
    assert refused.code == 2
    assert "by measurement" in refused.err


def test_polish_only_marks_nothing(run: Run, model_dir: Path, tmp_path: Path, ids: list[str]) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *ids, "--polish-only", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["o1_attn"] is None
    assert "o1_attn" not in cmf_reader.read(tmp_path / "out.cmf")[0]["provenance"]


def test_a_polish_that_fails_leaves_no_intermediate(run: Run, model_dir: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.arange(8))
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, "--corpus", tmp_path / "short.npy")
    assert (ran.code, ran.out) == (5, "")
    assert run("convert", model_dir, tmp_path / "out.cmf", *POLISH, "--corpus", tmp_path / "no.txt").code == 5
    assert run("convert", model_dir, tmp_path / "out.cmf", *POLISH, "--teacher", tmp_path / "no.cmf").code == 2
    assert not (tmp_path / "out.cmf").exists()
    assert leftovers(tmp_path) == []


class Terminator:
    """A listener that has the process terminated at the third step."""

    def __enter__(self) -> Terminator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stopping(self) -> bool:
        return False

    def __call__(self, event: Any) -> None:
        if event.event == "step" and event.step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_terminated_it_goes_on_with_the_same_command(
    run: Run, model_dir: Path, tmp_path: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, longer = tmp_path / "out.cmf", [*POLISH, "--steps", "6", *ids]
    assert run("convert", model_dir, out, *longer).code == 0
    expected = out.read_bytes()
    out.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("cortiq_fcd.display.make_listener", lambda *_, **__: Terminator())
        stopped = run("convert", model_dir, out, *longer)
    assert stopped.code == exits.TERMINATED
    assert "convert" in stopped.err
    assert not out.exists()
    assert leftovers(tmp_path) == []
    again = run("convert", model_dir, out, *longer, "--progress", "json")
    steps = [json.loads(line) for line in again.err.splitlines() if '"step"' in line]
    assert steps[0]["step"] == 4
    assert out.read_bytes() == expected


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "sub/notes.txt"])
def test_out_is_no_file_of_the_models_directory(run: Run, model_dir: Path, name: str) -> None:
    (model_dir / "sub").mkdir()
    if not (model_dir / name).exists():
        (model_dir / name).write_text("{}")
    before = (model_dir / name).read_bytes()
    assert run("convert", model_dir, model_dir / name, "--force").code == 2
    assert (model_dir / name).read_bytes() == before
