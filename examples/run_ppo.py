"""PPO on math problems, with a value model.

uv run examples/run_ppo.py                                                   # Qwen2.5-1.5B on one GPU
uv run --extra cpu examples/run_ppo.py --config examples/configs/ppo_math_cpu.yaml   # a CPU machine
uv run examples/run_ppo.py --dry-run ppo.ppo_epochs=2                        # the placement only
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config = load_from_command_line(
        PPOMasterConfig,
        description="PPO on math problems: a value model predicts rewards, the policy learns to exceed them.",
        default_config=str(CONFIGS / "ppo_math_1B.yaml"),
        placement="nemo_rl.algorithms.parts.placement:describe_placement",
        plan="nemo_rl.algorithms.parts.placement:propose_layout",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is known good
        from nemo_rl.algorithms.ppo import run_ppo

    return run_ppo(config)


if __name__ == "__main__":
    sys.exit(main())
