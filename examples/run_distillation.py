"""On-policy distillation on math problems.

uv run examples/run_distillation.py                                                   # Qwen3-4B teaches Qwen3-1.7B
uv run --extra cpu examples/run_distillation.py --config examples/configs/distillation_math_cpu.yaml   # a CPU machine
uv run examples/run_distillation.py --dry-run distillation.topk_logits_k=32              # the placement only
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.distillation import DistillationMasterConfig
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config = load_from_command_line(
        DistillationMasterConfig,
        description="On-policy distillation: the student samples, and learns the teacher's distributions there.",
        default_config=str(CONFIGS / "distillation_math.yaml"),
        placement="nemo_rl.algorithms.parts.placement:describe_placement",
        plan="nemo_rl.algorithms.parts.placement:propose_layout",
        fit=fit_workers,
        check=check_hardware,
    )
    # torch and Ray load here, after the configuration is known good
    with without_collections():
        from nemo_rl.algorithms.distillation import run_distillation

    return run_distillation(config)


if __name__ == "__main__":
    sys.exit(main())
