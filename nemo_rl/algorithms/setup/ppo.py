"""From a configuration to a run of PPO."""

from dataclasses import dataclass

from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.ppo import PPOTrainer
from nemo_rl.algorithms.setup.launch import start_policy
from nemo_rl.algorithms.setup.preflight import ModelInputs, check_saved_weights, prepare_model
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, RolloutSetup, prepare_rollouts, run_rollouts
from nemo_rl.algorithms.trainers.trainer import RunTools


@dataclass(frozen=True, kw_only=True)
class PPOInputs(RolloutInputs):
    """The checked parts of a PPO run."""

    value: ModelInputs


def run_ppo(config: PPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""

    def make_trainer(tools: RunTools, setup: RolloutSetup[PPOInputs]) -> PPOTrainer:
        model = setup.inputs.value
        value = start_policy(config, config.value, setup.stack, model, setup.training, name="value")
        return PPOTrainer(config, tools, setup.parts, value, model.flops)

    return run_rollouts(config, make_trainer, prepare)


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
    check_saved_weights(config.checkpointing, config.value, value.config, "value")
    return PPOInputs(**vars(rollouts), value=value)
