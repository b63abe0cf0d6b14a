"""From a configuration to a run of GRPO."""

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.setup.rollouts import prepare_rollouts, run_rollouts


def run_grpo(config: GRPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    return run_rollouts(config, lambda tools, setup: GRPOTrainer(config, tools, setup.parts), prepare_rollouts)
