"""From a configuration to a run of GRPO."""

from contextlib import ExitStack

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, build_rollouts, prepare_rollouts, start_trainer
from nemo_rl.algorithms.trainers.trainer import RunTools


def run_grpo(config: GRPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    return launch(config, prepare=prepare_rollouts, build=build)


def build(config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs) -> GRPOTrainer:
    """A trainer that is ready to run, resumed if there is a checkpoint. All workers end with the stack."""
    uses_reference = not config.grpo.skip_reference_policy_logprobs_calculation
    setup = build_rollouts(config, stack, inputs, init_reference_model=uses_reference)
    return start_trainer(GRPOTrainer(config, tools, setup.parts), config, stack, tools, inputs, setup)
