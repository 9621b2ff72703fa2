"""Rules of the house that the syntax trees can hold: no automatic differentiation, no torch where files are read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cortiq_fcd"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]

FORBIDDEN = {"autograd", "nn", "optim", "backward", "requires_grad", "requires_grad_"}
VAGUE = {"util", "utils", "helper", "helpers", "common", "misc", "core", "base"}
TORCH_FREE = ("io", "cli", "display")
TORCH_FREE_STAGES = ("config", "report", "sentence", "schemas", "inspection", "records")
MOST_LINES = 400


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every dotted piece of an import, every attribute and every keyword argument, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, piece) for alias in node.names for piece in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            pieces = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, piece) for piece in pieces)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FORBIDDEN:
            yield node.lineno, node.value  # getattr(torch, "nn")


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_no_automatic_differentiation(path: Path) -> None:
    found = [(line, name) for line, name in names_in(ast.parse(path.read_text("utf-8"))) if name in FORBIDDEN]
    assert not found, f"{path}: {found}"


def test_the_search_finds_what_it_looks_for() -> None:
    for text in (
        "import torch.nn as n",
        "from torch import nn",
        "from torch.optim import AdamW",
        "torch.autograd.grad(x)",
        "loss.backward()",
        "torch.ones(2, requires_grad=True)",
        "getattr(torch, 'nn')",
    ):
        assert any(name in FORBIDDEN for _, name in names_in(ast.parse(text))), text


def is_torch_free(path: Path) -> bool:
    folder, *rest = path.relative_to(PACKAGE).parts
    return folder in TORCH_FREE or (folder == "stages" and Path(rest[0]).stem in TORCH_FREE_STAGES) or not rest


@pytest.mark.parametrize("path", [p for p in MODULES if is_torch_free(p)], ids=str)
def test_reading_needs_no_torch(path: Path) -> None:
    imported = {
        piece.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for piece in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "torch" not in imported


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES


def test_every_name_says_what_is_in_it() -> None:
    assert not [path for path in MODULES if path.stem in VAGUE or path.parent.name in VAGUE]
