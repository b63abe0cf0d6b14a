"""From a configuration to a run of PPO."""

from contextlib import ExitStack
from dataclasses import dataclass

from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.ppo import PPOTrainer
from nemo_rl.algorithms.setup.launch import launch, start_policy
from nemo_rl.algorithms.setup.preflight import ModelInputs, check_saved_weights, prepare_model
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, build_rollouts, prepare_rollouts, start_trainer
from nemo_rl.algorithms.trainers.trainer import RunTools

VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class PPOInputs(RolloutInputs):
    """What a run of PPO is made from, checked."""

    value: ModelInputs


def run_ppo(config: PPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    return launch(config, prepare=prepare, build=build)


def prepare(config: PPOMasterConfig) -> PPOInputs:
    """Load and check what needs no worker; see `prepare_rollouts`."""
    value = prepare_model(config.value, config.checkpointing)
    rollouts = prepare_rollouts(config, value.identity)
    if value.tokenizer.get_vocab() != rollouts.model.tokenizer.get_vocab():
        raise ValueError(
            f"value.model_name: {config.value.model_name!r} has another vocabulary than the policy "
            f"{config.policy.model_name!r}, whose tokens it has to read; leave value.model_name out, or name a model "
            "of the same family"
        )
    check_saved_weights(config.checkpointing, config.value, value.config, VALUE)
    return PPOInputs(**vars(rollouts), value=value)


def build(config: PPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: PPOInputs) -> PPOTrainer:
    """A trainer that is ready to run, resumed if there is a checkpoint. What it started ends with the stack."""
    uses_reference = not config.ppo.skip_reference_policy_logprobs_calculation
    setup = build_rollouts(config, stack, inputs, init_reference_model=uses_reference, num_further_groups=1)
    value = start_policy(
        config,
        config.value,
        stack,
        inputs.value,
        setup.training.cluster,
        setup.training.accelerator,
        seed=config.ppo.seed,
        name=VALUE,
    )
    trainer = PPOTrainer(config, tools, setup.parts, value, inputs.value.flops)
    return start_trainer(trainer, config, stack, tools, inputs, setup)
