# Each target is a line that a person could type. The first one used makes the environment and installs into it; what only
# tests and lint need comes with the first of those.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
MODEL ?=

.PHONY: demo test lint bench schemas screenshots

demo: $(VENV)/installed
	$(VENV)/bin/cortiq-fcd demo $(DEMO)

test: $(VENV)/developing
	$(VENV)/bin/python -m pytest

lint: $(VENV)/developing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/installed
	$(VENV)/bin/python benchmarks/run_all.py $(MODEL)

schemas: $(VENV)/developing
	$(VENV)/bin/python tools/make_schemas.py

screenshots: $(VENV)/developing
	$(VENV)/bin/python tools/make_screenshots.py docs/images

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/developing: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
