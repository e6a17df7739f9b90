# make serve | test | check | bench      PORT and ARGS go to the server; PIP_INDEX_URL chooses the index
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
ARGS ?=
BIN := $(VENV)/bin
PIP_FLAGS := -q -c constraints-cpu.txt $(if $(PIP_INDEX_URL),--index-url $(PIP_INDEX_URL)) $(if $(PIP_EXTRA_INDEX_URL),--extra-index-url $(PIP_EXTRA_INDEX_URL))
SOURCES := pyproject.toml constraints-cpu.txt setup.py $(wildcard csrc/*)

.PHONY: serve test test-slow check bench setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 1p Makefile

# torch first and pinned: a bare dependency on it may take the multi-gigabyte CUDA build
$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) torch
	$(BIN)/pip install $(PIP_FLAGS) -e '.[demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install $(PIP_FLAGS) -e '.[demo,dev]'
	touch $@

setup: $(VENV)/.installed-dev

serve: $(VENV)/.installed
	$(BIN)/trimaran serve demo --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

check: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m trimaran bench $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
