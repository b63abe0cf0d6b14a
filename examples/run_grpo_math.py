"""GRPO on math problems.

uv run examples/run_grpo_math.py                                             # Qwen2.5-1.5B on one GPU
uv run --extra cpu examples/run_grpo_math.py --config examples/configs/grpo_math_cpu.yaml   # a CPU machine
uv run examples/run_grpo_math.py --dry-run grpo.num_prompts_per_step=64      # the placement and its memory only
uv run examples/run_grpo_math.py --plan 4x8xH100                             # a layout for 4 nodes of 8 GPUs
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main(what: str = "GRPO on math problems", default_config: str = "grpo_math_1B.yaml") -> int:
    config = load_from_command_line(
        GRPOMasterConfig,
        description=f"{what}: sample answers, verify them, reinforce the right ones.",
        default_config=str(CONFIGS / default_config),
        placement="nemo_rl.algorithms.parts.placement:describe_placement",
        plan="nemo_rl.algorithms.parts.placement:propose_layout",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is known good
        from nemo_rl.algorithms.grpo import run_grpo

    return run_grpo(config)


if __name__ == "__main__":
    sys.exit(main())
