# Every target sets up what it needs, on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo quick test slow papers mutants check lint wheel bench clean

demo: $(READY)
	$(BIN)/glocal demo

# the laws on one small model, in under 40 seconds
quick: $(READY)
	$(BIN)/python -m pytest -n auto -m "quick and not slow" tests/algorithms tests/wire tests/core

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow" tests src

slow: $(READY)
	$(BIN)/python -m pytest -m slow

# the tests of the papers' packages, then every study of theirs in small
papers: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow" papers/liang2020/tests papers/liang2020/src
	$(BIN)/python papers/liang2020/short_runs.py

# faults in the round, the wire and aggregation, one at a time: each must fail its test
mutants: $(READY)
	$(BIN)/python -m tests.mutants

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel:
	PYTHON="$(PYTHON)" .ci/bare-wheel

bench: $(READY)
	$(BIN)/python -m benchmarks.run --workloads A B C --rounds 7 --out docs/results/benchmark.json
	$(BIN)/python -m benchmarks.scaling --out docs/results/scaling.json
	$(BIN)/python -m benchmarks.draw --benchmark docs/results/benchmark.json --scaling docs/results/scaling.json --into docs/images

$(READY): pyproject.toml constraints.txt papers/liang2020/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" --editable papers/liang2020
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps byzfl  # for one test
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
