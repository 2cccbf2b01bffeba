# Each target makes the virtual environment .venv, with the versions of constraints.txt, when it is
# missing or out of date.  Another interpreter:  make PYTHON=python3.13 VENV=.venv-3.13 test

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEPENDENCIES := pyproject.toml constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: help demo test test-slow test-full test-peers coverage docs lint format clean

help:
	@echo "make demo        train a tied and an untied head on the embedded corpus and compare them"
	@echo "make test        lint, format, types, imports and tests"
	@echo "make test-slow   long tests: notebooks, runs killed again and again, bits on many shards"
	@echo "make test-full   all tests, with the whole product of cases (installs PyTorch)"
	@echo "make test-peers  comparisons with other libraries (installs PyTorch)"
	@echo "make coverage    tests, and the share of headlab's lines that they run"
	@echo "make docs        the API reference, in build/api"
	@echo "make format      format the code and mend what ruff can mend"
	@echo "make clean       remove the virtual environment and what tools left behind"

demo: $(VENV)/.installed
	$(BIN)/python -m experiments.tied_vs_untied.run --quick

test: lint
	$(PYTEST)

test-slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not full and not peers"

test-full: lint $(VENV)/.installed-peers
	$(PYTEST) -m ""

test-peers: $(VENV)/.installed-peers
	$(PYTEST) -m peers

coverage: $(VENV)/.installed
	$(PYTEST) -m "not full and not peers" --cov

docs: $(VENV)/.installed
	$(BIN)/python -m docs.api build/api

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headlab needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(DEPENDENCIES) | $(BIN)/python
	$(INSTALL) --editable '.[test]'
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed
	$(INSTALL) --editable '.[test,peers]'
	@touch $@
