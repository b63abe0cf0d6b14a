# syntax=docker/dockerfile:1
# The driver's environment and, with --build-arg EXTRA=cpu, the one for machines without a GPU.
#   docker build -t nemo-rl .
#   docker run --gpus all --shm-size=16g -v "$PWD/results:/opt/nemo-rl/results" nemo-rl uv run examples/run_grpo_math.py
# A compiler stays in the image: Triton and vLLM compile kernels when they first run.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates curl git libnuma1 python3-pip \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install --no-cache-dir --break-system-packages uv

ENV UV_LINK_MODE=copy \
    UV_PYTHON_INSTALL_DIR=/opt/python \
    UV_PROJECT_ENVIRONMENT=/opt/nemo-rl/.venv \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 \
    RAY_USAGE_STATS_ENABLED=0

WORKDIR /opt/nemo-rl

# The packages first: a change of the code reuses this layer.
ARG EXTRA=vllm
COPY pyproject.toml .python-version README.md LICENSE ./
ENV UV_CACHE_DIR=/var/cache/uv
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --extra ${EXTRA} --no-dev --compile-bytecode --no-install-project

COPY . .
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --extra ${EXTRA} --no-dev --compile-bytecode

# `uv run` in the container takes the environment as it was built.
ENV UV_NO_SYNC=1
CMD ["uv", "run", "examples/run_grpo_math.py", "--help"]
