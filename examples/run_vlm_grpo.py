"""GRPO on questions about images, with a vision-language model.

uv run examples/run_vlm_grpo.py                                              # Qwen2.5-VL-3B on one GPU
uv run --extra cpu examples/run_vlm_grpo.py --config examples/configs/grpo_vlm_cpu.yaml   # a CPU machine
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.setup.hardware import check_hardware
from nemo_rl.config.cli import load_from_command_line

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config = load_from_command_line(
        GRPOMasterConfig,
        description="GRPO on questions about images: sample answers, compare them, reinforce the right ones.",
        default_config=str(CONFIGS / "grpo_vlm_3B.yaml"),
        placement="nemo_rl.algorithms.setup.placement:describe_placement",
        plan="nemo_rl.algorithms.setup.memory:propose_layout",
        check=check_hardware,
    )
    from nemo_rl.algorithms.setup.grpo import run_grpo  # torch and Ray load here, after the configuration is known good

    return run_grpo(config)


if __name__ == "__main__":
    sys.exit(main())
