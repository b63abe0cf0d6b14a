"""GRPO on questions about images, with a vision-language model: run_grpo_math.py with another configuration.

uv run examples/run_vlm_grpo.py                                              # Qwen2.5-VL-3B on one GPU
uv run --extra cpu examples/run_vlm_grpo.py --config examples/configs/grpo_vlm_cpu.yaml   # a CPU machine
"""

from __future__ import annotations

import sys

from run_grpo_math import main

if __name__ == "__main__":
    sys.exit(main("GRPO on questions about images", "grpo_vlm_3B.yaml"))
