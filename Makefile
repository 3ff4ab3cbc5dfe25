# `make demo` and `make test` work on a fresh machine: each creates .venv, installs what it needs, and runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test engines test-engines test-sglang test-vllm lint types bench docs clean

demo: $(VENV)/.installed
	$(BIN)/specsync demo $(ARGS)

# Most tests wait for ranks more than they compute: two files at a time. WORKERS=0 is one at a time, with output as it comes.
test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# The real engines on CPU, each version in an environment of its own (.venv-ENGINE-VERSION), built when it is absent.
# The results, with each test's seconds, are left in build/. VLLM=0.32.0 builds that version alone: the oldest one comes
# with 3 GB of CUDA libraries that nothing uses.
engines: $(VENV)/.installed
	$(BIN)/python -m tests.engines.sglang.environment
	$(BIN)/python -m tests.engines.vllm.environment $(VLLM)

test-engines: test-sglang test-vllm

test-sglang: $(VENV)/.installed
	$(BIN)/python -m tests.engines.sglang.environment
	$(BIN)/python -m pytest tests/engines/sglang tests/engines/test_kernels.py --durations=0 --junitxml=build/test-sglang.xml $(ARGS)

test-vllm: $(VENV)/.installed
	$(BIN)/python -m tests.engines.vllm.environment $(VLLM)
	$(BIN)/python -m pytest tests/engines/vllm --durations=0 --junitxml=build/test-vllm.xml $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The documentation site, into docs/_build/html; every warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/host_cost.py $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo 'Installing into $(VENV): a minute or two, once.' >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
