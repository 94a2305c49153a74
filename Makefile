# The whole setup from nothing: `make test`. Everything installed lives in .venv.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup lint types test test-all check demo clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# The constraints hold torch to the build that is meant; bytecode is written when it is first needed.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		-c constraints.txt -e '.[test]'
	@touch $@

setup: $(STAMP)  ## .venv with the library and all that its tests need

lint: $(STAMP)  ## ruff
	@$(BIN)/ruff check .

types: $(STAMP)  ## pyright
	@$(BIN)/pyright

test: lint types  ## lint, types and the covering selection of tests
	@$(PYTEST) -m 'not slow' --durations=10 $(ARGS)

test-all: lint types  ## lint, types and the full product of tests
	@$(PYTEST) --hypothesis-profile=full --durations=25 $(ARGS)

check: $(STAMP)  ## the correctness gate on this machine
	@$(BIN)/python -m headloss check

# Two threads that wait for each other should sleep: other work may share the cores.
demo: $(STAMP)  ## train a small model by SFT, then by GSPO, and report
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo.py $(ARGS)

clean:  ## remove .venv and every cache
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
