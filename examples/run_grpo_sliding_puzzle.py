"""GRPO on the sliding puzzle, a game of several turns: run_grpo_math.py with another configuration.

uv run examples/run_grpo_sliding_puzzle.py                                   # Qwen2.5-1.5B-Instruct on one GPU, 5x5
uv run --extra cpu examples/run_grpo_sliding_puzzle.py --config examples/configs/grpo_sliding_puzzle_cpu.yaml   # 2x2
uv run examples/run_grpo_sliding_puzzle.py env.sliding_puzzle_game.cfg.game_config.size=3   # a smaller board
"""

from __future__ import annotations

import sys

from run_grpo_math import main

if __name__ == "__main__":
    sys.exit(main("GRPO on the sliding puzzle", "grpo_sliding_puzzle.yaml"))
