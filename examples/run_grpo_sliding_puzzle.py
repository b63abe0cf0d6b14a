"""GRPO on the sliding puzzle, a game of several turns.

uv run examples/run_grpo_sliding_puzzle.py                                   # Qwen2.5-1.5B-Instruct on one GPU, 5x5
uv run --extra cpu examples/run_grpo_sliding_puzzle.py --config examples/configs/grpo_sliding_puzzle_cpu.yaml   # 2x2
uv run examples/run_grpo_sliding_puzzle.py env.sliding_puzzle_game.cfg.game_config.size=3   # a smaller board
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.setup.hardware import check_hardware
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config = load_from_command_line(
        GRPOMasterConfig,
        description="GRPO on the sliding puzzle: play games move by move, learn from those that were solved.",
        default_config=str(CONFIGS / "grpo_sliding_puzzle.yaml"),
        placement="nemo_rl.algorithms.setup.placement:describe_placement",
        plan="nemo_rl.algorithms.setup.placement:propose_layout",
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is known good
        from nemo_rl.algorithms.setup.grpo import run_grpo

    return run_grpo(config)


if __name__ == "__main__":
    sys.exit(main())
