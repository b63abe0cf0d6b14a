"""Direct preference optimisation on pairs of answers.

uv run examples/run_dpo.py                                             # Llama-3.2-1B-Instruct on one GPU
uv run --extra cpu examples/run_dpo.py --config examples/configs/dpo_cpu.yaml   # a CPU machine
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.supervised import DPOMasterConfig
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config = load_from_command_line(
        DPOMasterConfig,
        description="Direct preference optimisation: prefer the chosen answers of a dataset of pairs.",
        default_config=str(CONFIGS / "dpo.yaml"),
        placement="nemo_rl.algorithms.parts.placement:describe_supervised",
        plan="nemo_rl.algorithms.parts.placement:propose_layout",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is good
        from nemo_rl.algorithms.dpo import run_dpo

    return run_dpo(config)


if __name__ == "__main__":
    sys.exit(main())
