"""Supervised fine-tuning of a vision-language model: run_sft.py with another configuration.

uv run examples/run_vlm_sft.py                                               # Qwen2.5-VL-3B on one GPU
uv run --extra cpu examples/run_vlm_sft.py --config examples/configs/sft_vlm_cpu.yaml   # a CPU machine
"""

from __future__ import annotations

import sys

from run_sft import main

if __name__ == "__main__":
    sys.exit(main("conversations with images", "sft_vlm_3B.yaml"))
