# Everything is set up in .venv from Python 3.11 or newer alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs bench

demo: $(VENV)/examples.ok
	$(BIN)/python examples/demo.py

test: $(VENV)/tests.ok
	$(BIN)/python -m pytest

lint: $(VENV)/lint.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# One stamp for each extra, made anew when the requirements change.
$(VENV)/%.ok: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

# `make bench ONLY=eager` for one of them.
bench: $(VENV)/benchmarks.ok
	$(BIN)/python benchmarks/report.py $(ONLY)

docs: $(VENV)/docs.ok
	$(BIN)/mkdocs build --strict
