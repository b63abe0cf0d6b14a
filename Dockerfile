# syntax=docker/dockerfile:1
# Engine, driver and Ray's dashboard in one environment, for a user without rights. docs/docker.md has the commands.
#   docker build -t nemo-rl .                                              # GPUs
#   docker build -t nemo-rl-cpu --build-arg BASE=ubuntu:24.04 --build-arg EXTRA=cpu .
#   docker build -t nemo-rl-sglang --build-arg EXTRA=sglang-gpu .          # engines of SGLang on GPUs of their own
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}
ARG EXTRA=vllm

# The compiler stays in the image: Triton and vLLM compile kernels when they first run. KubeRay's probes call wget.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates curl git libnuma1 python3-pip wget \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install --no-cache-dir --break-system-packages uv

# Ubuntu's images have a user 1000 already. /tmp/uv is a cache below and must still be writable when it is not. A login
# shell, which KubeRay starts, finds `ray` in /usr/local/bin.
RUN id -nu 1000 || useradd --create-home --uid 1000 nemo \
    && install -d -o 1000 -g 1000 /opt/nemo-rl /opt/python /tmp/uv \
    && ln -s /opt/nemo-rl/.venv/bin/ray /usr/local/bin/ray
USER 1000
WORKDIR /opt/nemo-rl

# `uv run` in the container takes the environment as it was built.
ENV UV_LINK_MODE=copy \
    UV_CACHE_DIR=/tmp/uv \
    UV_PYTHON_INSTALL_DIR=/opt/python \
    UV_NO_SYNC=1 \
    VIRTUAL_ENV=/opt/nemo-rl/.venv \
    PATH=/opt/nemo-rl/.venv/bin:$PATH \
    PYTHONPATH=/opt/nemo-rl \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 \
    RAY_USAGE_STATS_ENABLED=0

# The packages first: a change of the code reuses this layer. Bytecode makes vLLM import in 7 s instead of 15 to 70.
COPY --chown=1000:1000 .python-version ./
COPY --chown=1000:1000 requirements/${EXTRA}.txt requirements/
RUN --mount=type=cache,target=/tmp/uv,uid=1000,gid=1000 \
    uv venv \
    && uv pip sync --require-hashes --compile-bytecode requirements/${EXTRA}.txt

COPY --chown=1000:1000 . .
RUN uv run --offline examples/run_grpo_math.py --help > /dev/null && ray --version

# Environments of engines that do not fit into the one above: --build-arg ENGINES=sglang-gpu
ARG ENGINES=""
RUN --mount=type=cache,target=/tmp/uv,uid=1000,gid=1000 \
    for extra in ${ENGINES}; do \
        uv run --offline python -c "from nemo_rl.utils.venvs import python_executable_for as make; make('${extra}')"; \
    done

CMD ["uv", "run", "examples/run_grpo_math.py", "--help"]
