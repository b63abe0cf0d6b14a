#!/bin/bash
# What this project wants to know of its first GPU, on a machine with one and without a network: 15 minutes at most,
# the most informative first. OUT/gpu.json is written anew after each number, so that a kill leaves what was measured.
#
#     first_gpu.sh OUT [OPTIONS]         # beside the parts of tools/pack_for_gpu.sh, or in a checkout
#
# OPTIONS are those of benchmarks/gpu.py, for instance `--parts refit train`. PYTHON is the interpreter with torch
# (python3), and SITE the folder that the parts are unpacked into (/tmp/first_gpu).
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n 's/^# \{0,1\}//p' "$0" | tail -n +2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
project=$here/..

if compgen -G "$here/part.*" >/dev/null; then
    site=${SITE:-/tmp/first_gpu}
    if [[ ! -e $site/unpacked ]]; then
        mkdir -p "$site"
        cat "$here"/part.* | tar xz -C "$site"
        touch "$site/unpacked"
    fi
    project=$site/project
    export PYTHONPATH=$site/site${PYTHONPATH:+:$PYTHONPATH}
    export VLLM_USE_FLASHINFER_SAMPLER=0 # it is not among the parts
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

cd "$project"
{
    uname -a
    df -h /dev/shm "${TMPDIR:-/tmp}"
    free -g
    nvidia-smi || echo "nvidia-smi does not answer"
    "$python" -m torch.utils.collect_env || true
} >"$out/machine.txt" 2>&1
parts=(ipc sleep grpo refit train generation head tests)
exec "$python" benchmarks/gpu.py --json "$out/gpu.json" --parts "${parts[@]}" --within-s $((900 - SECONDS - 30)) "$@"
