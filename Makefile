# make demo, make test: each sets up a .venv in this checkout first, everything by name from the package index.
#   PYTHON=python3.12   the Python to make it with
#   VENV=system         use PYTHON as it is: no .venv, nothing installed (a GPU machine that already has torch)
#   ARGS="..."          further arguments for `octavo demo` or pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(VENV),system)
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
endif

# Two processes of one thread each are faster than one of two threads: the tests' tensors are small.
PARALLEL = $(shell $(PY) -c 'import xdist' 2>/dev/null && printf '%s' '-n 2')
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help setup demo test test-all test-gpu test-lowest check format docs evidence site

help:
	@echo 'make demo        a real model through an FP8 paged cache: text, perplexity, bytes, an HTML report'
	@echo 'make test        style, types, unit tests and the code in the docs; no GPU needed'
	@echo 'make test-all    the same and the slow tests'
	@echo 'make test-gpu    the tests that need an NVIDIA GPU'
	@echo 'make test-lowest the tests with the lowest versions that pyproject.toml allows, in a .venv-lowest of their own'
	@echo 'make format      rewrite the files in the project style'
	@echo 'make docs        rewrite what the docs show of the command line, and docs/rules.md'
	@echo 'make evidence    rewrite docs/evidence.md and the figures of the docs from the records in benchmarks/results'
	@echo 'make site        build the docs as a site, in build/site'

setup:
	@$(PYTHON) tools/environment.py $(VENV)

demo: setup
	$(PY) -m octavo demo $(ARGS)

test: check
	$(PYTEST) $(PARALLEL) -m 'not slow and not gpu' $(ARGS)

test-all: check
	$(PYTEST) $(PARALLEL) -m 'not gpu' $(ARGS)

test-gpu: setup
	$(PY) -m pytest -m gpu $(ARGS)

# Without a GPU, and without the engines' tests, which fetch engines. A second torch is installed: where the package index has
# it as a CUDA build only, as the public one does, several GB with its libraries. Python 3.10 to 3.12: the lowest numpy has
# no wheels for a newer one.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) tools/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install -qq -c .venv-lowest/constraints.txt torch triton
	.venv-lowest/bin/python -m pip install -qq -c .venv-lowest/constraints.txt -e '.[transformers,report,serve]' \
		httpx hypothesis openai pytest pytest-xdist ruff
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n 2 -m 'not slow and not gpu' $(ARGS)

check: setup
	$(call tool,ruff,check .)
	$(call tool,ruff,format --check .)
	$(call tool,pyright,--pythonpath $(PY))

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup
	$(PY) tools/refresh_docs.py

evidence: setup
	@mkdir -p build
	$(PY) -m octavo report benchmarks/results/h200/*.jsonl benchmarks/results/h200/accuracy-*.json \
		benchmarks/results/cpu/*.json --out build/report.html --document docs/evidence.md
	$(PY) tools/figures.py

site: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# A .venv has every tool. A system Python may not: that is said, and the tests still run.
ifeq ($(VENV),system)
tool = @if $(PY) -c 'import $(1)' 2>/dev/null; then $(PY) -m $(1) $(2); else echo '$(1) is not installed: $(1) $(2) left out'; fi
else
tool = $(PY) -m $(1) $(2)
endif
