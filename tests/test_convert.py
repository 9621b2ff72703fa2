"""`cortiq convert`, `cortiq-fcd export`, and what the console script hands on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from cortiq_fcd import cli
from cortiq_fcd.cli import exits
from cortiq_fcd.io.hf import writing
from cortiq_fcd.io.hf.safetensors import StoredTensor
from cortiq_fcd.io.layout import DType
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.io.writer import create_model
from tests.io.small_hf_model import LLAMA, llama_arrays, write_directory
from tests.oracles import cmf_reader
from tests.tiny_model import write_ids, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
O1 = ["--o1", "all", "--o1-m", "4", "--o1-window", "2", "--o1-sink", "0"]
POLISH = ["--polish", *O1, "--seq", "32", "--steps", "2", "--batch", "1", "--threads", "1", "--progress", "none"]

Run = Callable[..., "Ran"]


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ran:
        before = signal.getsignal(signal.SIGTERM)
        try:
            code = exits.run([str(argument) for argument in arguments])
        finally:
            signal.signal(signal.SIGTERM, before)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "hf")


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    train, val = write_ids(tmp_path / "train.npy", 2000), write_ids(tmp_path / "val.npy", 400, seed=1)
    return ["--corpus", str(train), "--val-corpus", str(val)]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".") or "converted" in path.name)


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
    assert run("convert", tmp_path / "nothing", tmp_path / "out.cmf").code == 2
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


def test_polish_in_the_same_command(run: Run, model_dir: Path, tmp_path: Path, text: list[str]) -> None:
    out = tmp_path / "out.cmf"
    ran = run("convert", model_dir, out, *POLISH, *text, "--json")
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
    assert "whole report" in run("convert", model_dir, out, *POLISH, *text, "--force").out


def test_polish_gives_what_two_commands_give(run: Run, model_dir: Path, tmp_path: Path, text: list[str]) -> None:
    out = tmp_path / "out.cmf"
    kept = run("convert", model_dir, out, *POLISH, *text, "--keep-intermediate", "--json")
    converted = tmp_path / "out.cmf.converted.cmf"
    assert kept.document["intermediate"] == str(converted)
    run("convert", model_dir, tmp_path / "alone.cmf", *O1)
    assert converted.read_bytes() == (tmp_path / "alone.cmf").read_bytes()
    ran = run("polish", converted, tmp_path / "second.cmf", *POLISH[1:], *text)
    assert ran.code == 0, ran.err
    assert (tmp_path / "second.cmf").read_bytes() == out.read_bytes()
    again = run("convert", model_dir, tmp_path / "third.cmf", *POLISH, *text, "--keep-intermediate")
    assert again.code == 0  # beside another OUT
    blocked = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *text, "--keep-intermediate")
    assert blocked.code == 2


def test_polish_only_marks_nothing(run: Run, model_dir: Path, tmp_path: Path, text: list[str]) -> None:
    ran = run("convert", model_dir, tmp_path / "out.cmf", *POLISH, *text, "--polish-only", "--json")
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

    def __call__(self, event: Any) -> None:
        if event.event == "step" and event.step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_terminated_it_goes_on_with_the_same_command(
    run: Run, model_dir: Path, tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, longer = tmp_path / "out.cmf", [*POLISH, "--steps", "6", *text]
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


# export


def test_export_and_back(run: Run, tmp_path: Path) -> None:
    data = ROOT / "cortiq_fcd" / "data"
    ran = run("export", data / "demo.cmf", tmp_path / "hf", "--json")
    assert ran.code == 0, ran.err
    assert "exact attention" in ran.err
    assert ran.document["output"]["shards"] == 1
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == files
    marks = ["--o1", "all", "--o1-m", "16", "--o1-window", "8", "--o1-sink", "4"]
    assert run("convert", tmp_path / "hf", tmp_path / "demo.cmf", *marks).code == 0
    with open_model(data / "demo.cmf") as first, open_model(tmp_path / "demo.cmf") as second:
        assert second.header["provenance"]["o1_attn"] == first.header["provenance"]["o1_attn"]
        assert second.section("vocab") == first.section("vocab")
        assert second.header["tokenizer_config"] == first.header["tokenizer_config"]
        assert first.tensors.keys() == second.tensors.keys()
        for name, record in first.tensors.items():
            assert second.tensors[name].dtype == record.dtype
            assert np.array_equal(first.raw(name), second.raw(name))


def test_export_in_shards_and_other_floats(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    model = write_tiny_model(tmp_path / "in.cmf")
    ran = run("export", model, tmp_path / "hf", "--dtype", "f16", "--json")
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert ran.document["output"]["shards"] == len(shards) > 1
    arrays = {name: array for shard in shards for name, array in load_file(shard).items()}
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text("utf-8"))
    assert index["weight_map"].keys() == arrays.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    with open_model(model) as source:
        assert all(np.array_equal(source.decode(name).astype(np.float16), array) for name, array in arrays.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))["torch_dtype"] == "float16"
    assert run("convert", tmp_path / "hf", tmp_path / "back.cmf").code == 0


def test_export_goes_into_a_new_directory_only(run: Run, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "in.cmf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine", encoding="utf-8")
    for target in (tmp_path / "full", model, tmp_path / "no" / "where"):
        ran = run("export", model, target)
        assert (ran.code, ran.out) == (2, "")
        assert "hint: " in ran.err
    assert run("export", model, tmp_path / "x", "--dtype", "q8_row").code == 2
    (tmp_path / "empty").mkdir()
    assert run("export", model, tmp_path / "empty").code == 0


@pytest.mark.parametrize(
    "arch",
    [
        {"embed_multiplier": 2.0},
        {"logit_multiplier": 0.5},
        {"query_pre_attn_scalar": 4},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 30.0},
        {"num_loops": 2},
        {"norm_style": "gemma"},
        {"partial_rotary_factor": 0.5},
        {"rope_freq_factors": [1.0, 1.5, 2.0, 3.0]},
        {"layer_types": ["FullAttention", "SlidingAttention"], "sliding_window": 4, "partial_rotary_factor": 0.25},
    ],
)
def test_what_a_config_can_not_say_is_refused_by_name(run: Run, tmp_path: Path, arch: dict[str, Any]) -> None:
    model = write_tiny_model(tmp_path / "in.cmf", arch=arch)
    ran = run("export", model, tmp_path / "hf")
    assert (ran.code, ran.out) == (4, "")
    assert f"arch.{list(arch)[-1]}" in ran.err
    assert not (tmp_path / "hf").exists()


def test_a_record_of_rope_settings_counts_only_if_it_explains_the_factors(run: Run, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    folder = write_directory(tmp_path / "hf", {**LLAMA, "rope_scaling": scaling})
    assert run("convert", folder, tmp_path / "out.cmf").code == 0
    assert run("export", tmp_path / "out.cmf", tmp_path / "back").code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["rope_scaling"] == scaling
    with open_model(tmp_path / "out.cmf") as model:
        header = json.loads(json.dumps(model.header))
        tensors = [(n, DType.F32, r.shape, lambda n=n: model.decode(n)) for n, r in model.tensors.items()]
        header["arch"]["rope_freq_factors"][3] *= 1.01
        create_model(tmp_path / "other.cmf", header=header, tensors=tensors)
    ran = run("export", tmp_path / "other.cmf", tmp_path / "other")
    assert ran.code == 4
    assert "rope_freq_factors" in ran.err


def test_a_weight_too_large_for_f16_leaves_no_directory(run: Run, tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.norm.weight"][0] = 1e6
    folder = write_directory(tmp_path / "hf", LLAMA, arrays)
    assert run("convert", folder, tmp_path / "out.cmf").code == 0
    ran = run("export", tmp_path / "out.cmf", tmp_path / "back", "--dtype", "f16")
    assert ran.code == 2
    assert "model.norm.weight" in ran.err
    assert not (tmp_path / "back").exists()
    assert leftovers(tmp_path) == []


def test_special_tokens_come_back_by_name(run: Run, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    folder = write_directory(
        tmp_path / "hf", {**LLAMA, "bos_token_id": 1, "eos_token_id": [2]}, tokenizer=words.to_str().encode()
    )
    run("convert", folder, tmp_path / "out.cmf")
    assert run("export", tmp_path / "out.cmf", tmp_path / "back").code == 0
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text("utf-8"))
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == words.to_str().encode()


# The console script

LAUNCHER = f"#!{sys.executable}\nimport sys\nfrom cortiq_fcd.cli import cortiq\nsys.exit(cortiq())\n"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def call(program: Path, *arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(ROOT)}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_other_commands_go_to_another_cortiq(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "c" / "cortiq", '#!/bin/sh\necho "other $@"\nexit 7\n')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cortiq").symlink_to(ours)
    ran = call(ours, "run", "x y", "--json", path=[tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "other run x y --json\n", "")


def test_never_to_itself(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "elsewhere" / "cortiq", LAUNCHER)  # the same package in another environment
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cortiq").symlink_to(ours)
    os.link(ours, tmp_path / "b" / "hard")
    path = [tmp_path / "a", tmp_path / "b", tmp_path / "elsewhere", tmp_path / "nowhere"]
    ran = call(tmp_path / "b" / "cortiq", "run", path=path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no other cortiq on PATH" in ran.stderr


def test_a_wrapper_around_us_does_not_turn_in_circles(tmp_path: Path) -> None:
    ours = script(tmp_path / "a" / "cortiq", LAUNCHER)
    script(tmp_path / "w" / "cortiq", f'#!/bin/sh\nexec {ours} "$@"\n')
    ran = call(tmp_path / "w" / "cortiq", "run", path=[tmp_path / "w", Path("/bin"), Path("/usr/bin")])
    assert ran.returncode == 2
    assert "no other cortiq on PATH" in ran.stderr


def test_help_and_no_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for arguments, code, word in ((["--help"], 0, "--keep-intermediate"), (["convert", "--help"], 0, "--o1-window")):
        monkeypatch.setattr(sys, "argv", ["cortiq", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.cortiq()
        assert ended.value.code == code
        assert word in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cortiq"])
    with pytest.raises(SystemExit) as ended:
        cli.cortiq()
    assert ended.value.code == 2
    assert "no command" in capsys.readouterr().err


def test_the_example_for_other_converters(tmp_path: Path, text: list[str]) -> None:
    page = (ROOT / "docs" / "convert.md").read_text("utf-8")
    example = tmp_path / "example.py"
    example.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    model = write_tiny_model(tmp_path / "in.cmf", provenance={"o1_attn": {"layers": "all", "m": 4, "w": 2, "sink": 0}})
    launcher = f"#!{sys.executable}\nimport sys\nfrom cortiq_fcd.cli import main\nsys.exit(main())\n"
    script(tmp_path / "bin" / "cortiq-fcd", launcher)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out.cmf"
    options = [*text, "--seq", "32", "--steps", "2", "--batch", "1", "--threads", "1"]

    def example_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(example), str(model), str(out), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    ran = example_run(*options)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("step ")][-1].startswith("step 2 of 2, loss ")
    assert lines[-1].split()[0] in ("polished", "identity")
    assert out.exists()
    model.unlink()
    again = example_run(*options)
    assert again.returncode == 1
    assert "exit 2: error: " in again.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "sub/notes.txt"])
def test_out_is_no_file_of_the_models_directory(run: Run, model_dir: Path, name: str) -> None:
    (model_dir / "sub").mkdir()
    if not (model_dir / name).exists():
        (model_dir / name).write_text("{}")
    before = (model_dir / name).read_bytes()
    assert run("convert", model_dir, model_dir / name, "--force").code == 2
    assert (model_dir / name).read_bytes() == before
