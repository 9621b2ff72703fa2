"""README.md tells the truth about commands, exit codes, and where things are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cortiq_fcd import errors
from cortiq_fcd.cli.commands import app
from tests import command_options

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_TORCHRUN = {"--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--max-restarts", "--shutdown-timeout"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## Where everything is")[1].split("```")[1]
    folders: list[str] = []
    for line in filter(None, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        assert (ROOT / "".join(folders)).exists(), "".join(folders)


def test_the_table_of_commands_is_the_programs() -> None:
    named = set(re.findall(r"^\| `(\w+)", README.split("| command | does |")[1].split("\n\n")[0], re.MULTILINE))
    assert named == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_the_exit_codes_are_the_programs() -> None:
    listed = re.findall(r"^\| ([\d, ]+) \|", README.split("## Exit codes")[1].split("## ")[0], re.MULTILINE)
    codes = {int(code) for cell in listed for code in cell.split(",")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CortiqError)]
    assert codes == {kind.exit_code for kind in kinds} | {0, 1, 130, 143}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_is_mentioned_exists(page: Path) -> None:
    known = command_options.flags() | {"--help", "--install-completion"} | OF_TORCHRUN
    text = "\n".join(line for line in page.read_text("utf-8").splitlines() if not line.startswith("Not done yet"))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= known


def test_every_link_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_demo_installs_nothing_that_only_tests_need() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\S+):[^\n]*?(\S+)$", makefile, re.MULTILINE))
    assert rules["demo"] == "$(VENV)/installed"
    assert {rules[name] for name in ("test", "lint")} == {"$(VENV)/developing"}
    recipe = makefile.split("\n$(VENV)/installed:")[1].split("\n\n")[0]
    assert "pip install" in recipe
    assert "[dev]" not in recipe


def test_the_library_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, but for a run of one small step."""
    code = README.split("## As a library")[1].split("```python")[1].split("```")[0]
    for old, new in (
        ('"steps": 40', '"steps": 1'),
        ('"batch": 8', '"batch": 1'),
        ('"eval_every": 20', '"eval_every": 0'),
    ):
        assert old in code
        code = code.replace(old, new)
    (tmp_path / "demo").mkdir()
    shutil.copyfile(ROOT / "cortiq_fcd" / "data" / "demo.cmf", tmp_path / "demo" / "demo.cmf")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(("polished", "identity"))
    assert (tmp_path / "demo" / "library.cmf.report.json").is_file()


@pytest.mark.parametrize("script", ["run_all.py", "bench_step.py"])
def test_a_benchmark_of_a_model_that_is_not_there_ends_in_one_line(script: str, tmp_path: Path) -> None:
    for name in ("none.cmf", "notes.txt"):
        (tmp_path / "notes.txt").write_text("dear diary " * 100)
        command = [sys.executable, str(ROOT / "benchmarks" / script), str(tmp_path / name)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
        assert ran.stderr.startswith("error: ")
        assert name in ran.stderr
