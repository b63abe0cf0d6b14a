"""Why do training and generation disagree? Compare both on the weights of a checkpoint, and name the cause.

uv run examples/diagnose.py results/grpo/step_100                       # a checkpoint, with its own configuration
uv run examples/diagnose.py path/to/model --config examples/configs/grpo_math_1B.yaml      # a Hugging Face folder
uv run --extra cpu examples/diagnose.py results/grpo_cpu/step_10 policy.generation.temperature=0.7

A checkpoint has to come from GRPO. Convert one of PPO or distillation to a Hugging Face folder first
(examples/converters/convert_dcp_to_hf.py).

The exit status is 0 if they agree to the rounding of their kernels, and 1 if a cause is named.
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
    arguments = sys.argv[1:]
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(str(__doc__))
        return 0
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(f"{__doc__}\nerror: the first argument is a checkpoint or the folder of a model\n")
        return 2
    folder, rest = Path(arguments[0]), arguments[1:]
    is_checkpoint = (folder / "training_info.json").is_file()
    if not is_checkpoint and not (folder / "config.json").is_file():
        sys.stderr.write(f"error: {folder} is no checkpoint (training_info.json) and no model (config.json)\n")
        return 2
    if not is_checkpoint:
        rest = [*rest, f"policy.model_name={folder.absolute()}"]
    config = load_from_command_line(
        GRPOMasterConfig,
        description="Compare training and generation on the weights of a checkpoint.",
        default_config=str(folder / "config.yaml" if is_checkpoint else CONFIGS / "grpo_math_1B.yaml"),
        argv=rest,
        placement="nemo_rl.algorithms.parts.placement:describe_placement",
        fit=fit_workers,
        check=check_hardware,
    )
    with without_collections():
        from nemo_rl.algorithms.sampling_only import diagnose

    return diagnose(config, folder.absolute() if is_checkpoint else None)


if __name__ == "__main__":
    sys.exit(main())
