# `make demo` shows what comet-moe does, `make test` runs every check, `make check` the fast ones in two minutes,
# `make docs` builds the site, `make dist` the files of a release.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := $(VENV)/.demo
DOCS   := $(VENV)/.docs
DIST   := $(VENV)/.dist
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# An environment with everything serves for the demo and the site too.
installed = $(if $(wildcard $(READY)),$(READY),$(1))

.PHONY: demo test check lint format docs links dist clean

demo: $(call installed,$(DEMO))
	$(BIN)/comet-moe demo

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2

check: lint
	$(BIN)/pytest -n 2 -m "not slow"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(call installed,$(DOCS))
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs site
	@echo site/index.html

links: $(call installed,$(DOCS))
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b linkcheck docs site/links

dist: $(DIST)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch numpy
	$(PIP) --editable '.[dev]'
	touch $@

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[tune,report]'
	touch $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@

$(DIST): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[release]'
	touch $@

clean:
	rm -rf $(VENV) site dist
