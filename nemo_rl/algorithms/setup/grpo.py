"""From a configuration to a running GRPO."""

from __future__ import annotations

from contextlib import ExitStack

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, build_rollouts, prepare_rollouts
from nemo_rl.algorithms.setup.serve import start_openai_server
from nemo_rl.algorithms.trainers.trainer import RunTools


def run_grpo(config: GRPOMasterConfig) -> int:
    """The whole run; returns the exit status (see `launch`)."""
    return launch(config, prepare=prepare, build=build, num_steps=config.grpo.max_num_steps)


def prepare(config: GRPOMasterConfig) -> RolloutInputs:
    """See `prepare_rollouts`."""
    return prepare_rollouts(config)


def build(config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs) -> GRPOTrainer:
    """A trainer ready to run, resumed if there is a checkpoint; everything it started ends with the stack."""
    uses_reference = not config.grpo.skip_reference_policy_logprobs_calculation
    setup = build_rollouts(config, stack, inputs, init_reference_model=uses_reference)
    trainer = GRPOTrainer(config, tools, setup.parts)
    trainer.start()
    start_openai_server(config, stack, tools, inputs, setup)
    return trainer
