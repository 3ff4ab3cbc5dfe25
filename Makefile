# `make demo` and `make test` work on a fresh machine: each creates .venv, installs what it needs, and runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types bench clean

demo: $(VENV)/.installed
	$(BIN)/specsync demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/host_cost.py $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
