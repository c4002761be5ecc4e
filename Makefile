# Needs python3 (>= 3.10) and make; everything else is installed into .venv by the first target that needs it.
#
#   PYTHON=python3.12          the Python to make .venv with
#   PIP_ARGS='...'             further arguments for pip, such as --extra-index-url for an index of CPU wheels of torch
#   TORCH=torch==2.13.0        exactly this torch; otherwise a machine without an NVIDIA GPU gets a CPU build, and the
#                              install stops with advice if it finds none, rather than fetch gigabytes of CUDA
#   PART=2                     which part of the slow tests `make test-turn` runs, 1 to 7; otherwise that of the day
#   PYTEST_ARGS='-k accept'    further arguments for pytest
#   BENCH_ARGS='--regret'      arguments of `shoal bench`; BENCH_ARGS=--help lists them

PYTHON ?= python3
PIP_ARGS ?=
TORCH ?=
PART ?= turn
PYTEST_ARGS ?=
BENCH_ARGS ?=
export PYTHON PIP_ARGS TORCH
# Compiling modules and tests anew in every process would take a minute of each process of tests.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Marks that scripts/setup.sh leaves as its last act: an install that was killed is made again.
CORE := .venv/done-core
DEV := .venv/done-dev

.PHONY: help demo bench test test-turn test-all lane lanes lint types mutants package format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(CORE) ## n samples from the bundled pair, and what speculation did
	@$(BIN)/shoal demo

bench: $(CORE) ## speculative against plain decoding and Hugging Face generate, measured here
	@$(BIN)/shoal bench $(BENCH_ARGS)

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations=15

test: $(DEV) ## the tests, without those marked as slow
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-turn: $(DEV) ## the tests, and of those marked as slow a seventh, each day another (PART=2 for one of them), as CI does
	@$(PYTEST) --slow-part $(PART) $(PYTEST_ARGS)

test-all: $(DEV) ## all tests
	@$(PYTEST) $(PYTEST_ARGS)

lane: $(DEV) ## reduced tests in other surroundings: LANE=python-3.10, oldest, no-compiler, ... (scripts/lanes.py list)
	@$(BIN)/python scripts/lanes.py run $(or $(LANE),$(error which? LANE=NAME; scripts/lanes.py list))

lanes: $(DEV) ## every lane
	@$(BIN)/python scripts/lanes.py run

lint: $(DEV) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff check --preview --select PLW1514 . # text files without an encoding
	@$(BIN)/ruff format --check .

types: $(DEV) ## mypy, strict
	@$(BIN)/mypy

mutants: $(DEV) ## wrong changes of a room that no test sees: ROOM=sampling (scripts/mutants/rooms.toml), or HAND='words'
	@$(BIN)/python -c "import mutmut" 2>/dev/null || $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -e '.[mutants]'
	@$(BIN)/python scripts/mutants/run.py $(if $(ROOM),sample $(ROOM),hand '$(HAND)')

package: $(DEV) ## wheel and sources in dist/, checked and used
	@$(BIN)/python scripts/check_package.py

format: $(DEV) ## apply ruff's format and safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove .venv, builds and caches
	rm -rf .venv .lanes build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests scripts benchmarks training -name __pycache__ -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt
	@scripts/setup.sh core

$(DEV): $(CORE)
	@scripts/setup.sh dev
