# Every target sets up what it needs, on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test slow check lint clean

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

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
