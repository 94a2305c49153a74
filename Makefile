# The whole setup from nothing: `make test`. Everything installed lives in .venv.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup lint types tests test test-all test-frameworks test-release mutants docs dist check demo notes publish clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# The constraints hold torch to the build that is meant; bytecode is written when it is first needed.
# TORCH=2.10 takes that torch, TORCH=newest whichever is the newest.
TORCH ?=
CONSTRAINTS = grep -vE '$(if $(TORCH),^(torch|triton)==,^$$)' constraints.txt > .venv/constraints.txt \
	$(if $(filter-out newest,$(TORCH)),&& echo 'torch==$(TORCH).*' >> .venv/constraints.txt)
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv"
	@$(PYTHON) -m venv .venv
	@$(CONSTRAINTS)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		-c .venv/constraints.txt -e '.[test]'
	@touch $@

setup: $(STAMP)  ## .venv with the library and all that its tests need

lint: $(STAMP)  ## ruff, and its format of the package
	@$(BIN)/ruff check . && $(BIN)/ruff format --check -q headloss

types: $(STAMP)  ## pyright
	@$(BIN)/pyright

tests: $(STAMP)  ## the covering selection of tests alone
	@$(PYTEST) -m 'not slow' --durations=10 $(ARGS)

test: lint  ## lint, types and the covering selection of tests
	@$(BIN)/pyright & types=$$!; $(PYTEST) -m 'not slow' --durations=10 $(ARGS); tests=$$?; \
		wait $$types && exit $$tests

test-all: lint types  ## lint, types and the full product of tests
	@$(PYTEST) --hypothesis-profile=full --durations=25 $(ARGS)

# The other frameworks, without what they need beyond a CPU; torch and all else come from .venv.
# Megatron-Core and others ask for Python 3.12, and what is run of them runs on 3.11.
FRAMEWORKS := .venv-frameworks
$(FRAMEWORKS)/.installed: $(STAMP) tests/frameworks/requirements.txt tests/frameworks/sources.txt
	@echo "installing into $(FRAMEWORKS)"
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$($(FRAMEWORKS)/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
	@$(FRAMEWORKS)/bin/python -m pip install -qq --no-compile --no-deps --ignore-requires-python \
		--disable-pip-version-check -r tests/frameworks/requirements.txt
	@while read -r name url commit; do \
		git init -q .frameworks/$$name && cd .frameworks/$$name && \
		{ git cat-file -e $$commit 2>/dev/null || git fetch -q --depth 1 $$url $$commit; } && \
		git checkout -q $$commit && cd ../.. || exit 1; \
	done < tests/frameworks/sources.txt
	@touch $@

test-frameworks: $(FRAMEWORKS)/.installed  ## the losses beside those of other frameworks
	@OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -q -p no:cacheprovider \
		tests/frameworks $(ARGS)

# Other releases of Transformers and TRL than those of constraints.txt (or newest), before them on the path.
TRANSFORMERS ?=
TRL ?=
RELEASE := .venv-release
PINNED = $(if $(filter newest,$2),$1,$(if $2,$1==$2))
WANTED = $(call PINNED,transformers,$(TRANSFORMERS)) $(call PINNED,trl,$(TRL))
RELEASE_TESTS := $(addprefix tests/test_,releases.py transformers.py head_models.py rl.py) \
	$(wildcard tests/test_trl_*.py)
test-release: $(STAMP)  ## the adapters under TRANSFORMERS=x TRL=y, or one of the two
	@test -n "$(strip $(WANTED))" || { echo "want TRANSFORMERS=..., TRL=... or both"; exit 2; }
	@rm -rf $(RELEASE)
	@$(BIN)/python -m pip install -qq --no-compile --no-deps --disable-pip-version-check \
		--target $(RELEASE) $(WANTED)
	@PYTHONPATH=$(RELEASE) $(PYTEST) $(RELEASE_TESTS) $(ARGS)
# In a clone at the last commit. A run goes on where the last one ended; `rm -r .mutants` begins anew.
MUTANTS := .mutants
$(MUTANTS)/session.sqlite: $(STAMP)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		-c constraints.txt -e '.[mutants]'
	@rm -rf $(MUTANTS) && git clone -q . $(MUTANTS)/tree
	@cd $(MUTANTS)/tree && $(CURDIR)/$(BIN)/cosmic-ray init tests/helpers/mutants.toml ../new.sqlite
	@mv $(MUTANTS)/new.sqlite $@

mutants: $(MUTANTS)/session.sqlite  ## do the tests see 300 random changes? .mutants/report.md
	@cd $(MUTANTS)/tree && git checkout -q headloss && PYTHONPATH=$$PWD \
		$(CURDIR)/$(BIN)/python tests/helpers/mutants.py ../session.sqlite $(ARGS)

# Names of the API come from the source, so that the site's own tools are all that is needed.
DOCS := .venv/.docs
$(DOCS): $(STAMP)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		-c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)  ## the documentation into site/; a broken link or a missing name fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# The time of the last commit makes two builds the same bytes. The wheel is tried in an environment
# that has nothing else but what lies in .venv, where the library itself is only linked to.
# The README is pasted into an environment that its own lines make.
# URL=https://... is the address of the repository, for links and pictures on a package index.
DIST := .venv-dist
URL ?=
dist: $(STAMP)  ## wheel and sdist into dist/, the same bytes twice; wheel and README tried by themselves
	@rm -rf $(DIST) dist && $(PYTHON) -m venv $(DIST)
	@$(DIST)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt hatchling twine
	@export PROJECT_URL=$(URL) SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) && for folder in dist $(DIST)/again; do \
		$(DIST)/bin/python -m hatchling build -d $$folder; done && diff -r dist $(DIST)/again
	@$(DIST)/bin/python -m twine check --strict dist/*
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$($(DIST)/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
	@$(DIST)/bin/python -m pip install -qq --no-deps --disable-pip-version-check dist/*.whl
	@cd $(DIST) && bin/python -c "import headloss; assert '.venv-dist' in headloss.__file__" && \
		bin/headloss --version && bin/headloss doctor
	@$(PYTHON) -m venv $(DIST)/readme
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(DIST)/readme/bin/python docs/paste.py README.md

# By the workflow of a tag: notes first, which fail for a tag that is not the version's.
TAG ?=
notes:  ## the section of CHANGELOG.md about TAG=v0.1.0
	@$(PYTHON) docs/release_notes.py $(TAG)

publish:  ## the page of a release, with the files in dist/
	@$(PYTHON) docs/release_notes.py $(TAG) > dist.md
	@gh release create $(TAG) dist/* --title $(TAG) --notes-file dist.md && rm dist.md

check: $(STAMP)  ## the correctness gate on this machine
	@$(BIN)/python -m headloss check

# Two threads that wait for each other should sleep: other work may share the cores.
demo: $(STAMP)  ## train a small model by SFT, then by GSPO, and report
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo.py $(ARGS)

clean:  ## remove .venv and every cache
	rm -rf .venv .venv-dist .venv-frameworks .venv-release .frameworks .mutants .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
