# `make demo` and `make test` are all a fresh machine needs; both make .venv first.
#
#   PYTHON=python3.12      the interpreter that .venv is made with (3.11 or newer)
#   TORCH_ARGS="..."       more pip arguments for the torch install, e.g. another package index
#   WORKERS=2              how many processes share the tests
#   ARGS="..."             arguments for `steadykv demo` or pytest

PYTHON ?= python3
TORCH_ARGS ?=
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A bare `pip install torch` may fetch gigabytes of CUDA libraries: without a GPU, take the release
# that constraints/cpu.txt names. With one, any release in pyproject's range will do.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,--constraint constraints/cpu.txt)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format clean

help:
	@echo "make demo    one walk through a world, generated with five caches: ends with a page to look at"
	@echo "make test    the whole CPU suite"
	@echo "make lint    ruff (rules and layout) and mypy"
	@echo "make format  let ruff sort imports and lay out the code"
	@echo "make venv    only make .venv with everything the others need"
	@echo "make clean   remove .venv and caches; results are kept"

venv: $(STAMP)

# The stamp is written last, so an interrupted install is taken up again. Torch goes first: named
# by itself it is resolved under the constraint before another package can ask for it.
$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is not Python 3.11 or newer: set PYTHON=python3.11, say" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: $(PYTHON) has no venv module: install it (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(CONSTRAINTS) $(TORCH_ARGS) torch
	$(BIN)/python -m pip install $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/steadykv demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests training benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
