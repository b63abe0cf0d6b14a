"""Supervised fine-tuning on conversations.

uv run examples/run_sft.py                                             # Llama-3.2-1B on one GPU
uv run --extra cpu examples/run_sft.py --config examples/configs/sft_cpu.yaml   # a CPU machine
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.config.supervised import SFTMasterConfig
from nemo_rl.algorithms.parts.hardware import check_hardware
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.cli import load_from_command_line
from nemo_rl.utils.registry import without_collections

CONFIGS = Path(__file__).parent / "configs"


def main(what: str = "a dataset of conversations", default_config: str = "sft.yaml") -> int:
    config = load_from_command_line(
        SFTMasterConfig,
        description=f"Supervised fine-tuning on the assistant's messages in {what}.",
        default_config=str(CONFIGS / default_config),
        placement="nemo_rl.algorithms.parts.placement:describe_supervised",
        plan="nemo_rl.algorithms.parts.placement:propose_layout",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():  # torch and Ray load here, after the configuration is good
        from nemo_rl.algorithms.supervised import run_sft

    return run_sft(config)


if __name__ == "__main__":
    sys.exit(main())
