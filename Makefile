# Every target sets up what it needs, on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test slow check lint wheel bench clean

demo: $(READY)
	$(BIN)/glocal demo

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow"

slow: $(READY)
	$(BIN)/python -m pytest -m slow

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

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
