# One command each; every target sets up what it needs, once (.venv/.installed is the stamp).
PYTHON  ?= python3.11
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
TORCH   := torch==2.9.1
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu

# make train DATA=path WORKSPACE=path CONFIG=file ARGS="--train.max-steps 100"
WORKSPACE ?= workspace
CONFIG    ?= configs/quickstart.toml
DATA      ?=
ARGS      ?=
export PJRT_DEVICE ?= CPU

.DEFAULT_GOAL := help
.PHONY: help setup train prepare test test-fast lint bench lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with the locked versions (about 3 minutes, once)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -c 'import importlib.metadata as m; raise SystemExit(not m.version("torch").startswith("$(TORCH:torch==%=%)"))' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 0 --timeout 10 --index-url $(CPU_TORCH_INDEX) $(TORCH) 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
