# Two commands set everything up on a fresh machine: `make serve` and `make test`. The others reuse their venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

# serve needs the run-time packages only; everything else also those of developers.
$(STAMP)serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,plan]'
	touch $@

$(STAMP)dev: $(STAMP)serve
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,plan,dev]'
	touch $@

.PHONY: serve test check mutants bench clean

serve: $(STAMP)serve  ## start the server on the embedded model; ARGS="--port 8000" for flags
	$(BIN)/milepost serve $(ARGS)

test: check  ## everything that CI runs
	$(BIN)/python -m pytest -n 2 $(ARGS)
	$(BIN)/python -m tests.mutants

check: $(STAMP)dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

mutants: $(STAMP)dev  ## plant the known bugs one by one; each must be caught
	$(BIN)/python -m tests.mutants

bench: $(STAMP)dev  ## speed: core operations, then the engine against transformers
	$(BIN)/python bench/core_ops.py
	$(BIN)/python bench/engine.py

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
