"""Collect and record rollouts of a GRPO configuration without training, to look at them or to train from them later.

uv run examples/collect_rollouts.py --config examples/configs/grpo_math_1B.yaml \
    grpo.max_num_steps=4 grpo.rollout_record.save_dir=results/rollouts/qwen
uv run examples/show_rollouts.py results/rollouts/qwen --list

`policy.model_name` may be the folder of a checkpoint in Hugging Face format.
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


def main() -> int:
    config = load_from_command_line(
        GRPOMasterConfig,
        description="Play grpo.max_num_steps batches of the training prompts and record them; nothing is trained.",
        default_config=str(CONFIGS / "grpo_math_1B.yaml"),
        placement="nemo_rl.algorithms.parts.placement:describe_placement",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here
        from nemo_rl.algorithms.sampling_only import collect_rollouts

    return collect_rollouts(config)


if __name__ == "__main__":
    sys.exit(main())
