"""The command line: what goes to stdout and stderr, the exit codes, and what is never imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cortiq_fcd import errors
from cortiq_fcd.cli import exits
from cortiq_fcd.cli.resolving import resolve
from cortiq_fcd.cli.settings import SETTINGS
from cortiq_fcd.cli.toml import to_toml
from cortiq_fcd.events import Event
from cortiq_fcd.io.reader import open_model
from cortiq_fcd.stages.config import PolishConfig
from cortiq_fcd.stages.report import Report
from tests.command_line import Ran, Run
from tests.reports import sample_report
from tests.tiny_model import write_tiny_model

SMALL = ["--o1-m", "4", "--o1-window", "2", "--o1-sink", "0", "--seq", "32", "--steps", "3", "--threads", "1"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "in.cmf")


def is_expected_error(ran: Ran, code: int) -> bool:
    said = [line for line in ran.err.splitlines() if not line.startswith("warning: ")]
    return ran.code == code and ran.out == "" and said[0].startswith("error: ") and "Traceback" not in ran.err


# --- polish ------------------------------------------------------------------------------------------------------


def test_polish_then_report_verify_inspect(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    before = model.read_bytes()
    ran = run("polish", model, out, *SMALL, *ids, "--lr", "1e-2", "--eval-every", "1", "--json")
    assert ran.code == 0
    report = Report.model_validate_json(ran.out)
    assert json.loads(ran.out) == json.loads((tmp_path / "out.cmf.report.json").read_text())
    assert report.outcome == "polished"
    assert report.gate.status == "skipped"
    assert report.gate.reason
    assert any(report.gate.reason in warning for warning in report.warnings)
    assert "\r" not in ran.err
    assert "\x1b" not in ran.err
    assert "step 3/3" in ran.err
    assert model.read_bytes() == before

    shown = run("report", out)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("Polished")
    assert run("report", out, "--json").out == ran.out
    assert run("verify", out).code == 0
    inspected = json.loads(run("inspect", out, "--json").out)
    assert inspected["o1_attn"] == {"layers": "all", "m": 4, "w": 2, "sink": 0}
    assert inspected["fcd"]["best_step"] == report.best_step
    assert inspected["dir_hash"] == report.output.dir_hash
    assert inspected["polish"]["trainable_params"] == report.trainable_params


def test_the_file_of_settings_is_not_written(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[train]\nsteps = 3\n")
    for places in ([settings, "--force"], [tmp_path / "out.cmf", "--report", settings, "--force"]):
        for dry in ([], ["--dry-run"]):
            ran = run("polish", model, *places, *SMALL, *ids, "--config", settings, *dry)
            assert is_expected_error(ran, 2)
            assert "same file" in ran.err
    assert settings.read_text() == "[train]\nsteps = 3\n"


def test_identity(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    other = tmp_path / "other.json"  # what the training text teaches is wrong here
    other.write_text(json.dumps([i % 2 for i in range(400)]))
    flags = [*SMALL, *ids, "--val-corpus", other, "--lr", "0.003", "--kl", "0", "--steps", "10"]
    ran = run("polish", model, out, *flags, "--json", "-q")
    assert (ran.code, ran.err.count("\n")) == (0, 1)
    assert ran.err.startswith("warning: the generation gate was skipped"), "warnings are not hidden by -q"
    assert json.loads(ran.out)["outcome"] == "identity"
    assert run("report", out).out.startswith("Identity: nothing beat the conversion as it was")
    with open_model(model) as source, open_model(out) as copy:
        assert {n: t.hash64 for n, t in source.tensors.items()} == {n: t.hash64 for n, t in copy.tensors.items()}


def test_progress_json_is_one_event_a_line(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    from pydantic import TypeAdapter

    adapter: TypeAdapter[Event] = TypeAdapter(Event)
    ran = run("polish", model, tmp_path / "out.cmf", *SMALL, *ids, "--no-gate", "--progress", "json")
    assert (ran.code, ran.out) == (0, "")
    events = [adapter.validate_json(line) for line in ran.err.splitlines()]
    assert sum(event.event == "step" for event in events) == 3
    assert events[-1].event == "done"


def test_existing_out(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.cmf"
    out.write_bytes(b"mine")
    ran = run("polish", model, out, *SMALL, *ids)
    assert is_expected_error(ran, 2)
    assert "--force" in ran.err
    assert out.read_bytes() == b"mine"
    assert run("polish", model, out, *SMALL, *ids, "--force", "-q").code == 0


def test_out_that_is_in(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    link = tmp_path / "link.cmf"
    link.symlink_to(model)
    before = model.read_bytes()
    for out in (model, link):
        assert is_expected_error(run("polish", model, out, *SMALL, *ids, "--force"), 2)
    assert model.read_bytes() == before


def test_require_pass(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    ran = run("polish", model, tmp_path / "out.cmf", *SMALL, *ids, "--require-pass", "--progress", "none")
    assert ran.code == 10
    assert "--require-pass" in ran.err.split("error: ")[1]
    assert not list(tmp_path.glob("out*"))


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["polish", "no.cmf", "out.cmf"], ["report", "no.cmf"], ["inspect", "no.cmf"],
                                     ["verify", "no.cmf"]], ids=lambda c: c[0])  # fmt: skip
def test_missing_file(run: Run, command: list[str]) -> None:
    ran = run(*command)
    assert is_expected_error(ran, 2)
    assert ran.err == "error: no.cmf: there is no such file\nhint: check the path\n"


def test_a_model_that_was_not_converted(run: Run, tmp_path: Path) -> None:
    assert "name a file in it" in run("polish", tmp_path, "out.cmf").err
    (tmp_path / "config.json").write_text("{}")
    ran = run("polish", tmp_path, "out.cmf")
    assert is_expected_error(ran, 2)
    assert f"hint: convert it first: cortiq-fcd convert {tmp_path} model.cmf\n" in ran.err


@pytest.mark.parametrize("command", ["report", "inspect"])
def test_wrong_magic(run: Run, command: str, tmp_path: Path) -> None:
    (tmp_path / "bad.cmf").write_bytes(b"GGUF" + bytes(200))
    ran = run(command, tmp_path / "bad.cmf")
    assert is_expected_error(ran, 3)
    assert "magic" in ran.err


def test_verify_prints_a_line_for_each_fault(run: Run, model: Path, tmp_path: Path) -> None:
    damaged = bytearray(model.read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "bad.cmf").write_bytes(damaged)
    ran = run("verify", tmp_path / "bad.cmf")
    assert (ran.code, ran.err) == (3, "")
    assert ran.out.splitlines()[0].startswith("fault: ")
    assert ran.out.splitlines()[-1].endswith("1 fault")
    assert run("verify", model).out == f"{model}: no faults\n"


def test_polish_of_a_damaged_file(run: Run, model: Path, ids: list[str], tmp_path: Path) -> None:
    damaged = bytearray(model.read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "bad.cmf").write_bytes(damaged)
    ran = run("polish", tmp_path / "bad.cmf", tmp_path / "out.cmf", *SMALL, *ids, "-q")
    assert is_expected_error(ran, 3)
    assert not list(tmp_path.glob("out*"))


def test_unsupported_model(run: Run, ids: list[str], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "in.cmf", arch={"hidden_act": "gelu"})
    assert is_expected_error(run("polish", model, tmp_path / "out.cmf", *SMALL, *ids), 4)
    shown = run("inspect", model)
    assert shown.code == 0
    assert "not possible  arch.hidden_act" in shown.out


def test_text_without_a_tokenizer(run: Run, model: Path, tmp_path: Path) -> None:
    assert is_expected_error(run("polish", model, tmp_path / "out.cmf", *SMALL), 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--lr", "nan"], "--lr"),
        (["--kl", "1.5"], "--kl"),
        (["--o1-m", "3"], "--o1-m"),
        (["--save-dtype", "q2"], "--save-dtype"),
        (["--gate-profile", "severe"], "--gate-profile"),
        (["--progress", "bar"], "--progress"),
        (["--o1", "some"], "--o1"),
        (["--device", "abacus"], "--device"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flag_values(
    run: Run, model: Path, ids: list[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    ran = run("polish", model, tmp_path / "out.cmf", *SMALL, *ids, *arguments)
    assert is_expected_error(ran, 2), ran.err
    assert words in ran.err
    assert "hint: " in ran.err
    assert "pydantic" not in ran.err
    assert not list(tmp_path.glob("out*"))


def test_unknown_command_and_missing_argument(run: Run) -> None:
    assert run("polisj").err.startswith("error: No such command")
    assert is_expected_error(run("polisj"), 2)
    assert is_expected_error(run("polish", "in.cmf"), 2)
    assert run().code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(kind("a subject", "why"), kind.exit_code) for kind in (errors.CmfFormatError, errors.UnsupportedModelError)]
    + [(kind("why", hint="do this"), kind.exit_code) for kind in (
        errors.ConfigError, errors.CorpusError, errors.TokenizerError, errors.ResourceError, errors.DivergedError,
        errors.NothingPassedError)]
    + [(KeyboardInterrupt(), 130), (exits.Terminated(), 143), (MemoryError(), 6),
       (OSError(28, "No space left on device", "out.cmf"), 6), (PermissionError(13, "Denied", "out.cmf"), 2)],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_every_expected_error_has_its_code(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    from cortiq_fcd.stages import pipeline

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "run", fail)
    ran = run("polish", model, "out.cmf")
    assert is_expected_error(ran, code)
    if hint := getattr(error, "hint", ""):
        assert ran.err.endswith(f"hint: {hint}\n")


def test_a_bug_is_not_hidden(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_fcd.stages import pipeline

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(pipeline, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("polish", model, "out.cmf")


# --- configuration -----------------------------------------------------------------------------------------------


def test_config_round_trip(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    flags = [
        "--lr",
        "3e-4",
        "--o1",
        "deep2",
        "--corpus",
        'a "quoted" ä.txt',
        "--no-gate",
        "--force",
        "--seed",
        2**64 - 1,
    ]
    first = run("config", *flags)
    assert first.code == 0
    file.write_text(first.out, encoding="utf-8")
    assert run("config", "--config", file).out == first.out
    config = resolve({}, file)
    assert (config.train.lr, config.o1.layers, config.gate.enabled) == (3e-4, "deep2", False)
    assert config.corpus.train == Path('a "quoted" ä.txt')


def test_flags_win_over_the_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[train]\nsteps = 7\nlr = 1\n[gate]\nenabled = false\n")
    config = resolve({"train.steps": 9, "gate.enabled": True}, file)
    assert (config.train.steps, config.train.lr, config.gate.enabled) == (9, 1.0, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train\n", "is not valid TOML"),
        ("[train]\nstepz = 3\n", "train.stepz is no setting"),
        ("[train]\nsteps = 'three'\n", "train.steps"),
        ("train = 3\n", "train"),
        ("[train]\nlr = nan\n", "train.lr"),
        ("[o1]\nm = 2\n", "o1.m"),
    ],
)
def test_bad_toml(run: Run, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    ran = run("config", "--config", file)
    assert is_expected_error(ran, 2)
    assert words in ran.err
    assert str(file) in ran.err
    assert "did you mean train.steps?" in ran.err or "stepz" not in ran.err
    assert "nput should" not in ran.err
    assert is_expected_error(run("config", "--config", file, "--kl", "0.5"), 2)


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        ([], "[train]\nsteps = 'ten'", "FILE: train.steps: expected a whole number, got 'ten'"),
        ([], "[train]\nsteps = 1.5", "FILE: train.steps: expected a whole number, got 1.5"),
        ([], "[train]\nlr = true", "FILE: train.lr: expected a number, got True"),
        ([], "[gate]\nenabled = 1", "FILE: gate.enabled: expected true or false, got 1"),
        ([], "[gate]\nprofile = 'x'", "FILE: gate.profile: expected 'standard' or 'strict', got 'x'"),
        ([], "[o1]\nm = 2", "FILE: o1.m: expected at least 4, got 2"),
        ([], "[o1]\nlayers = 3", "FILE: o1.layers: expected a text, got 3"),
        ([], "[corpus]\ntrain = 3", "FILE: corpus.train: expected a path, got 3"),
        ([], "train = 3", "FILE: train: expected a table of settings, got 3"),
        (["--lr", "0"], "", "--lr: expected more than 0, got 0"),
        (["--kl", "2"], "", "--kl: expected at most 1, got 2"),
        (["--steps", "9999999999"], "", "--steps: expected at most 2147483647, got 9999999999"),
        (["--steps", "ten"], "", "--steps: expected a whole number, got 'ten'"),
        (["--lr", "fast"], "", "--lr: expected a number, got 'fast'"),
    ],
)
def test_a_setting_that_can_not_be(run: Run, tmp_path: Path, flags: list[str], text: str, said: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    ran = run("config", "--config", file, *flags)
    assert is_expected_error(ran, 2)
    error, hint = ran.err.splitlines()[:2]
    assert error.removesuffix(".0") == f"error: {said}".replace("FILE", str(file))
    assert hint.startswith("hint: ")
    if text and "table" not in said:
        assert "default: " in hint, "what the setting is"


@pytest.mark.parametrize("command", ["eval", "gate", "config"])
def test_a_hint_names_the_command_that_was_run(run: Run, command: str) -> None:
    assert run(command, *([] if command == "config" else ["x.cmf"]), "--steps", "ten", "--none").err.endswith(
        f"hint: see cortiq-fcd {command} --help\n"
    )
    assert exits.say(errors.ConfigError("--windows: no"), command) == 2


def test_config_file_that_is_not_there(run: Run) -> None:
    assert is_expected_error(run("config", "--config", "no.toml"), 2)


def test_options_cover_the_configuration() -> None:
    fields = {f"{section}.{key}" for section, table in PolishConfig() for key in type(table).model_fields}
    assert {setting.field for setting in SETTINGS} == fields - {"gate.every_checkpoint"}


def test_every_help_states_its_default() -> None:
    config = PolishConfig()
    for setting in SETTINGS:
        section, key = setting.field.split(".")
        default = getattr(getattr(config, section), key)
        assert "default: " in setting.help, setting.flag
        if default is not None and not isinstance(default, bool):
            assert setting.help.endswith(f"default: {default}"), setting.flag
        if isinstance(default, bool):
            assert setting.help.endswith({("enabled", True): "gate"}.get((key, default), "off")), setting.flag


def test_toml_names_what_is_not_set() -> None:
    assert "# layers is not set" in to_toml(PolishConfig())


# --- reading -----------------------------------------------------------------------------------------------------


def test_report_of_a_file_that_was_never_polished(run: Run, model: Path) -> None:
    ran = run("report", model)
    assert is_expected_error(ran, 2)
    assert "was never polished" in ran.err


def test_report_falls_back_to_the_record(run: Run, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "in.cmf", provenance={"fcd": {"steps": 20, "best_step": 5, "later": None}})
    assert "best_step  5" in run("report", model).out
    assert is_expected_error(run("report", model, "--json"), 2)
    beside = tmp_path / "in.cmf.report.json"
    for text, words in (("{}", "is not a readable report"), (sample_report().to_json(), "tells of another file")):
        beside.write_text(text)
        ran = run("report", model)
        assert "best_step  5" in ran.out
        assert words in ran.err


def test_inspect(run: Run, model: Path) -> None:
    ran = run("inspect", model)
    assert (ran.code, ran.err) == (0, "")
    for words in ("would convert  layers 0-1", "no setting: the file runs exact attention", "f32", "2 x FullAttention"):
        assert words in ran.out or words == "2 x FullAttention"
    assert max(map(len, ran.out.splitlines())) <= 80 + len(str(model))


def test_schema(run: Run) -> None:
    for name in ("report", "provenance", "config", "eval", "gate", "event"):
        text = (Path(__file__).parents[1] / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8")
        assert run("schema", name).out == text
    assert is_expected_error(run("schema", "reports"), 2)


# --- processes ---------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
sys.argv[0] = "cortiq-fcd"
from cortiq_fcd.cli.exits import run
code = run(sys.argv[1:])
heavy = sorted({"torch", "tokenizers", "safetensors"} & set(sys.modules))
print("imported:", heavy, file=sys.stderr)
sys.exit(code)
"""


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", ["--help", "polish --help", "schema report", "config", "inspect IN", "verify IN", "report IN"]
)
def test_reading_imports_no_torch(command: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "in.cmf", provenance={"fcd": {"steps": 20}})
    ran = in_a_process(*command.replace("IN", str(model)).split())
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("imported: []\n")
    assert ran.stdout


def test_help_is_quick() -> None:
    def seconds(*arguments: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        return time.perf_counter() - began

    bare = min(seconds("-c", "pass") for _ in range(5))
    quickest = min(seconds("-m", "cortiq_fcd", "--help") for _ in range(5))
    assert quickest < max(0.3, 20 * bare), "0.3 s, and more only where Python itself starts slowly"


def test_sigterm_ends_a_polish(model: Path, ids: list[str], tmp_path: Path) -> None:
    arguments = ["polish", str(model), str(tmp_path / "out.cmf"), *SMALL, *ids, "--steps", "1000000", "--no-gate"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cortiq_fcd", *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " step 1/" in line:
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait(60) == 143
    assert "error: interrupted; the state after step " in rest
    assert f"hint: to go on: cortiq-fcd polish {model}" in rest
    assert rest.rstrip().endswith("--resume")
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.cmf.partial"]
    process.stderr.close()
