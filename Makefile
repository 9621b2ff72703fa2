# Each target is a line that a person could type. The first one used makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench schemas

demo: .venv/installed
	$(BIN)/cortiq-fcd demo demo

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: .venv/installed
	$(BIN)/python -m benchmarks

schemas: .venv/installed
	$(BIN)/python tools/make_schemas.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
