"""Evaluation of a model on problems with known answers.

uv run examples/run_eval.py generation.model_name=results/grpo/step_100 data.dataset_name=math500     # one GPU
uv run --extra cpu examples/run_eval.py --config examples/configs/evals/eval_cpu.yaml                 # a CPU machine
uv run examples/run_eval.py --dry-run eval.num_tests_per_prompt=16 generation.temperature=0.6         # the placement
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs" / "evals"


def main() -> int:
    config = load_from_command_line(
        EvalMasterConfig,
        description="Evaluation: sample answers to problems, score them, report how many are right.",
        default_config=str(CONFIGS / "eval.yaml"),
        placement="nemo_rl.algorithms.parts.placement:describe_evaluation",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is known good
        from nemo_rl.evals.run import run_eval

    return run_eval(config)


if __name__ == "__main__":
    sys.exit(main())
