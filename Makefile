# Everything is set up in .venv from Python 3.11 or newer alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check

# One process for each core: what takes time is to compile, which JAX does on one of them.
PYTEST := -m pytest --numprocesses $(shell nproc 2>/dev/null || echo 2) --dist worksteal

.PHONY: demo test test-oldest test-newest newest mutants lint docs bench

demo: $(VENV)/examples.ok
	$(BIN)/python examples/demo.py

test: $(VENV)/tests.ok
	$(BIN)/python $(PYTEST)

lint: $(VENV)/lint.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# One stamp for each extra, made anew when the requirements change.
$(VENV)/%.ok: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable '.[$*]'
	touch $@

# The oldest supported versions, as in pyproject.toml.
OLDEST := jax==0.7.2 jaxlib==0.7.2 equinox==0.13.3

# Here the annotations are checked while the tests run, which takes a fifth more time.
test-oldest: $(VENV)-oldest/suite.ok
	$(VENV)-oldest/bin/python $(PYTEST) --jaxtyping-packages=loopax,beartype.beartype $(TESTS)

$(VENV)-oldest/suite.ok: pyproject.toml Makefile
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(PIP) --editable '.[suite]' $(OLDEST)
	touch $@

# The newest versions, on each newer Python that is at hand. `make test` has them for this one.
NEWER := 3.12 3.13
test-newest: $(NEWER:%=test-newest-%)

test-newest-%:
	@python=$$(.ci/interpreter $*) || { echo "no Python $* here"; exit 0; }; \
	$(MAKE) --no-print-directory PYTHON="$$python" VENV=$(VENV)-$* newest

newest: $(VENV)/newest.ok
	$(BIN)/python $(PYTEST)

$(VENV)/newest.ok: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade --upgrade-strategy eager --editable '.[suite]'
	touch $@

# Half an hour for each hundred lines: not part of what every change has to pass.
mutants: $(VENV)/mutation.ok
	$(BIN)/python .ci/mutants.py

# `make bench ONLY=eager` for one of them.
bench: $(VENV)/benchmarks.ok
	$(BIN)/python benchmarks/report.py $(ONLY)

docs: $(VENV)/docs.ok
	$(BIN)/mkdocs build --strict
