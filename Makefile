# One command each; every target sets up what it needs, once (.venv/.installed is the stamp).
PYTHON  ?= python3.11
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
SCAN    := .venv-scan
TORCH   := torch==2.9.1
# Its cuDNN (9.19) has attention with a mask, which that of 2.9 (9.10) lacks.
CUDA_TORCH := torch==2.11.0
# Come with PyTorch's CUDA build and stay out of the lock: the CPU build needs none of them.
CUDA_PACKAGES := $(foreach name,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn cufft cufile curand cusolver cusparse \
  nccl nvjitlink nvshmem nvtx,nvidia-$(name)-cu12) nvidia-cusparselt-cu12
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu

# make train DATA=file-or-folder CONFIG=configs/small.toml CYCLE=2026-11-20 ARGS="--train.max-steps 100"
DATA      ?=
NAME      := $(if $(DATA),$(basename $(notdir $(patsubst %/,%,$(DATA)))),quickstart)
WORKSPACE ?= workspace/$(NAME)
CYCLE     ?= first
# None where trnpipe.toml says it all (trnpipe init).
CONFIG    ?= $(if $(DATA),configs/quickstart.toml,$(if $(wildcard trnpipe.toml),,configs/quickstart.toml))
ARGS      ?=
# As in settings; cpu is faster than the default, which shows how a Trainium device would run.
BACKEND   ?=
FLAGS      = $(if $(CONFIG),--config $(CONFIG) --workspace $(WORKSPACE)) --cycle $(CYCLE) $(if $(DATA),--data.path $(DATA) --data.name $(NAME)) $(if $(BACKEND),--backend $(BACKEND)) $(ARGS)
export PJRT_DEVICE ?= CPU

# Tests start hundreds of processes, each of which would compile all of our modules where no bytecode may be written.
# Three workers for two cores: one of them usually waits, for Terraform or the end of a time-out.
PYTEST     = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3
MYPY_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trnpipe/mypy

# What Terraform outputs for trnjobs: files of settings and, over them, build/infra.json.
TF         = terraform -chdir=infra
AWS_FLAGS  = $$(cat build/infra.flags) $(if $(filter command line environment,$(origin CYCLE)),--cycle $(CYCLE)) $(ARGS)
FLAGS_OF   = import json, sys; print(*(f"--config {file}" for file in [*json.load(sys.stdin), "build/infra.json"]))
define WRITE_OUTPUTS
$(TF) output -json settings > build/infra.json
$(TF) output -json settings_files > build/infra.files
$(BIN)/python -c '$(FLAGS_OF)' < build/infra.files > build/infra.flags
endef
APPLY      = $(TF) apply -input=false ../build/infra.plan
APPROVE   ?=
ASK        = test "$(APPROVE)" = yes || { printf 'Do it? (yes or no) '; read answer; test "$$answer" = yes; }
NO_DIGEST := 0000000000000000000000000000000000000000000000000000000000000000

# make image push IMAGE=neuron REPOSITORY=123456789012.dkr.ecr.us-east-1.amazonaws.com/relevance BASE_DIGEST=sha256:...
IMAGE       ?= cpu
IMAGES      := cpu cuda neuron neuron-native
REPOSITORY  ?= trnpipe
# Of neuron-native, which has no default: docker/neuron-native.Dockerfile.
BASE_IMAGE  ?=
BASE_DIGEST ?=
SOURCE      ?=
VERSION      = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION     = $(shell git describe --always --abbrev=12 --exclude='*')$(if $(shell git status --porcelain),-dirty)
TAG          = $(REPOSITORY):$(IMAGE)-$(REVISION)
REGISTRY     = $(firstword $(subst /, ,$(REPOSITORY)))
REGION       = $(word 4,$(subst ., ,$(REGISTRY)))
# All extras but neuron, whose packages come from AWS's own index.
EXTRAS      := xla hf tensorboard ann baselines lightning onnx signing dev
UV_COMPILE  := uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate --no-header

.DEFAULT_GOAL := help
.PHONY: help setup cycle train evaluate embed compile health prepare mine test tests test-native test-thorough test-fast lint style types scan docs bench image try-lock push terraform bootstrap repository deploy submit outputs destroy lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with the locked versions (about 3 minutes, once)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -c 'import importlib.metadata as m; raise SystemExit(not m.version("torch").startswith("$(TORCH:torch==%=%)"))' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 0 --timeout 10 --index-url $(CPU_TORCH_INDEX) $(TORCH) 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

train: $(STAMP)  ## prepare data, train and score valid and test, leave a verified checkpoint; run again: continues or says it is done
	$(BIN)/trnpipe prepare $(FLAGS)
	$(BIN)/trnpipe train $(FLAGS)

evaluate: $(STAMP)  ## train, then compare the model with the one in production: promote it, or refuse it (exit 80)
	$(BIN)/trnpipe prepare $(FLAGS)
	$(BIN)/trnpipe train $(FLAGS)
	$(BIN)/trnpipe evaluate $(FLAGS)

embed: evaluate  ## the same, then the whole catalogue to vectors with the promoted model, and verify them
	$(BIN)/trnpipe embed $(FLAGS)
	$(BIN)/trnpipe embed verify $(FLAGS)

cycle: $(STAMP)  ## all of it as jobs on this machine, with retries: check, prepare, compile, train, evaluate, embed, report
	$(BIN)/trnjobs submit --target local $(FLAGS)

compile: $(STAMP)  ## prepare data, then trace and compile every graph of the cycle ahead of time
	$(BIN)/trnpipe prepare $(FLAGS)
	$(BIN)/trnpipe compile $(FLAGS)

health: $(STAMP)  ## check this machine: host, tensor operations, memory, collectives between ranks
	$(BIN)/trnpipe health $(FLAGS)

prepare: $(STAMP)  ## only prepare the data
	$(BIN)/trnpipe prepare $(FLAGS)

mine: $(STAMP)  ## prepare data, then mine hard negatives; make train ARGS="--train.mined-per-query 4" takes them
	$(BIN)/trnpipe prepare $(FLAGS)
	$(BIN)/trnpipe mine $(FLAGS)

# Types are checked by one process, for a minute where nothing is cached: beside the tests.
test: style  ## lint, types and all tests but the slowest proofs
	@$(MAKE) --no-print-directory --jobs 2 types tests

tests: $(STAMP)
	MAKEFLAGS= $(PYTEST) --dist worksteal $(TESTS)

# torch-neuronx 2.14 is for torch 2.14 and Python 3.12 to 3.14: every test that needs no XLA, as it would run there.
NATIVE        := .venv-native
NATIVE_TORCH  := torch==2.14.0
NATIVE_LOCK   := tests/native/requirements.lock
# Come with it too, named by CUDA 13 otherwise.
NATIVE_CUDA   := cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 \
  $(foreach name,cublas cuda-cupti cuda-nvrtc cuda-runtime cufft cufile curand cusolver cusparse nvjitlink nvtx,nvidia-$(name))
NATIVE_PYTHON ?= $(firstword $(foreach version,3.14 3.13 3.12,$(shell command -v python$(version))))
test-native: $(NATIVE)/.installed  ## all tests that need no XLA, on torch 2.14 and the newest Python of this machine, 3.12 to 3.14
	PYTHONDONTWRITEBYTECODE= $(NATIVE)/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

$(NATIVE)/.installed: pyproject.toml $(NATIVE_LOCK)
	test -n "$(NATIVE_PYTHON)" || { echo 'no python3.12 to python3.14 on the path, expected one: make test-native NATIVE_PYTHON=...'; exit 1; }
	test -x $(NATIVE)/bin/python || $(NATIVE_PYTHON) -m venv $(NATIVE)
	$(NATIVE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(NATIVE_LOCK)
	$(NATIVE)/bin/python -m pip install --quiet --disable-pip-version-check $(NATIVE_TORCH)
	$(NATIVE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

test-thorough: $(STAMP)  ## slow proofs of `make test` on further variants, and its properties with many examples
	$(PYTEST) -m "thorough or property" --hypothesis-profile=thorough $(TESTS)

test-fast: $(STAMP)  ## unit tests only, seconds
	$(PYTEST) -m "not stage and not fault and not slow and not thorough" $(TESTS)

lint: style types  ## formatting, lint, strict types, Dockerfiles

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/hadolint --failure-threshold style docker/*.Dockerfile

types: $(STAMP)
	$(BIN)/mypy --cache-dir=$(MYPY_CACHE)

scan: $(SCAN)/.installed  ## security rules over infra/, docker/ and the workflow; every exception has its reason beside it
	$(SCAN)/bin/checkov --directory infra --directory docker --directory .github \
	  --framework terraform dockerfile github_actions secrets --compact --quiet --skip-download

$(SCAN)/.installed: infra/scan.lock
	$(PYTHON) -m venv $(SCAN)
	$(SCAN)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r infra/scan.lock
	touch $@

docs: $(STAMP)  ## write docs/settings.md, the reference of all settings
	$(BIN)/trnjobs config --markdown > docs/settings.md

bench: $(STAMP)  ## run the default benches (`python -m bench --help` lists all); rewrites docs/results.md, bench/results/README.md and the table of the README (about half an hour, quiet machine)
	$(BIN)/python -m bench $(ARGS)
	$(BIN)/python -m bench.table --write

image:  ## build docker/<IMAGE>.Dockerfile, IMAGE=cpu (default), cuda, neuron or neuron-native, as REPOSITORY:<IMAGE>-<revision>
	$(if $(filter $(IMAGE),$(IMAGES)),,$(error IMAGE is '$(IMAGE)', expected one of $(IMAGES): make image IMAGE=cpu))
	$(if $(filter neuron-native,$(IMAGE)),$(if $(BASE_IMAGE),,$(error BASE_IMAGE is empty, expected AWS's training image of Neuron SDK 2.33 or later: make image IMAGE=neuron-native BASE_IMAGE=<repository>:<tag>)), \
	  $(if $(BASE_IMAGE),$(error BASE_IMAGE is '$(BASE_IMAGE)', which only IMAGE=neuron-native takes: the others have theirs in docker/)))
	docker buildx build --platform linux/amd64 --provenance=false --load --file docker/$(IMAGE).Dockerfile \
	  $(if $(BASE_IMAGE),--build-arg 'BASE_IMAGE=$(BASE_IMAGE)') --build-arg 'BASE_DIGEST=$(BASE_DIGEST)' --build-arg 'VERSION=$(VERSION)' --build-arg 'REVISION=$(REVISION)' \
	  --build-arg 'SOURCE=$(SOURCE)' --tag '$(TAG)' .

try-lock:  ## install docker/<IMAGE>.lock into a fresh environment and run docker/verify.py there: IMAGE=neuron PYTHON=python3.12
	$(PYTHON) docker/try_lock.py $(IMAGE) build/try-$(IMAGE)

push:  ## AWS: push what `make image` built to REPOSITORY in ECR, and print the line for infra/ with its digest
	$(if $(findstring .dkr.ecr.,$(REGISTRY)),,$(error REPOSITORY is '$(REPOSITORY)', expected one in ECR: make push REPOSITORY=<account>.dkr.ecr.<region>.amazonaws.com/<name>))
	$(if $(findstring -dirty,$(REVISION)),$(error the checkout has changes, expected what a commit holds: git status, then make image push))
	@password=$$(aws ecr get-login-password --region '$(REGION)') \
	  && printf %s "$$password" | docker login --username AWS --password-stdin '$(REGISTRY)'
	docker push '$(TAG)'
	@digest=$$(aws ecr describe-images --region '$(REGION)' --registry-id '$(firstword $(subst ., ,$(REGISTRY)))' \
	    --repository-name '$(REPOSITORY:$(REGISTRY)/%=%)' --image-ids 'imageTag=$(lastword $(subst :, ,$(TAG)))' \
	    --query 'imageDetails[0].imageDigest' --output text) \
	  && echo "$(if $(filter cpu,$(IMAGE)),cpu_image,image) = \"$(REPOSITORY)@$$digest\""

terraform:
	mkdir -p build
	$(TF) init -input=false -backend-config=backend.hcl

bootstrap:  ## AWS: print what an account needs before the first deployment
	@sh infra/bootstrap.sh

repository: terraform  ## AWS, the first time: only the storage of infra/, so that there is a repository to push images to
	$(TF) plan -input=false -out=../build/infra.plan -target=module.storage -var image=none@sha256:$(NO_DIGEST) -var cpu_image=none@sha256:$(NO_DIGEST)
	@$(ASK)
	$(APPLY)

deploy: $(STAMP) terraform  ## AWS: show the plan of infra/ and whether a cycle fits it, ask, then make it (docs/deploy.md)
	$(TF) plan -input=false -out=../build/infra.plan
	$(TF) show -json ../build/infra.plan > build/infra.plan.json
	$(BIN)/trnjobs fit build/infra.plan.json
	@$(ASK)
	$(APPLY)
	$(WRITE_OUTPUTS)

submit: $(STAMP) outputs  ## AWS: show the jobs of a cycle (CYCLE=2026-11-20, else today), ask, then submit them
	$(BIN)/trnjobs plan --target batch $(AWS_FLAGS)
	@$(ASK)
	$(BIN)/trnjobs submit --target batch $(AWS_FLAGS)

outputs: $(STAMP) terraform  ## AWS: fetch what Terraform made, as build/infra.json for trnjobs --config
	$(WRITE_OUTPUTS)

destroy: terraform  ## AWS: show what would be taken down, ask, then do it; a bucket that holds anything stays
	$(TF) plan -destroy -input=false -out=../build/infra.plan
	@$(ASK)
	$(APPLY)
	rm -f build/infra.json build/infra.files build/infra.flags

lock: $(STAMP)  ## resolve requirements.lock and the other locks anew (needs uv)
	mkdir -p build
	$(UV_COMPILE) pyproject.toml $(EXTRAS:%=--extra %) --python-version 3.11 \
	  --no-emit-package torch --no-emit-package triton $(CUDA_PACKAGES:%=--no-emit-package %) -o requirements.lock
	grep -oE '^[^ #]+==[^ ]+' requirements.lock > build/constraints.txt
	grep -v '^pyarrow==' build/constraints.txt > build/constraints-neuron.txt
	echo setuptools | $(UV_COMPILE) - --python-version 3.11 -c build/constraints.txt -o docker/build.lock
	$(UV_COMPILE) pyproject.toml --extra xla --extra baselines --extra notify --extra signing --python-version 3.11 --python-platform x86_64-manylinux_2_28 -c build/constraints.txt \
	  --no-emit-package torch --no-emit-package triton $(CUDA_PACKAGES:%=--no-emit-package %) -o docker/cpu.lock
	# torch 2.11 refuses setuptools 82.
	grep -v '^setuptools==' build/constraints.txt > build/constraints-cuda.txt
	echo '$(CUDA_TORCH)' | $(UV_COMPILE) pyproject.toml - --extra baselines --extra notify --extra signing --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  -c build/constraints-cuda.txt -o docker/cuda.lock
	# verify.py needs packaging. pyarrow 26 refuses numpy 1.26, which AWS's Neuron image may hold; 24 takes it and numpy 2.
	printf '%s\n' 'pyarrow<25' packaging | $(UV_COMPILE) pyproject.toml - --extra baselines --extra notify --extra signing --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
	  -c build/constraints-neuron.txt --override docker/neuron.overrides -o docker/neuron.lock
	# AWS's images from SDK 2.33 on hold Python 3.14. Only wheels: nothing is compiled while the image is built.
	echo packaging | $(UV_COMPILE) pyproject.toml - --extra baselines --extra notify --extra signing --python-version 3.14 --python-platform x86_64-manylinux_2_28 --no-build \
	  -c build/constraints.txt --override docker/neuron.overrides -o docker/neuron-native.lock
	# The same versions beside a later torch, see test-native.
	printf '%s\n' '$(NATIVE_TORCH)' ninja | $(UV_COMPILE) pyproject.toml - $(patsubst %,--extra %,$(filter-out xla,$(EXTRAS))) --python-version 3.13 \
	  -c build/constraints.txt --no-emit-package torch --no-emit-package triton $(NATIVE_CUDA:%=--no-emit-package %) -o $(NATIVE_LOCK)
	# Its pins disagree with ours: an environment of its own, see scan.
	echo checkov | $(UV_COMPILE) - --python-version 3.11 --python-platform x86_64-manylinux_2_28 -o infra/scan.lock

clean:  ## remove the virtual environment and caches (workspaces stay)
	rm -rf $(VENV) $(NATIVE) .mypy_cache .ruff_cache .pytest_cache *.egg-info
