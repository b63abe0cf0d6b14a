"""From a configuration to a run of GRPO, or to rollouts that are recorded without training."""

from __future__ import annotations

from contextlib import ExitStack

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, build_rollouts, prepare_rollouts, start_trainer
from nemo_rl.algorithms.trainers.metrics import rollout_metrics
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.utils.config import CheckpointingConfig


def run_grpo(config: GRPOMasterConfig) -> int:
    """Train; returns the exit status (see `run_command`)."""
    return launch(config, prepare=prepare_rollouts, build=build, num_steps=config.grpo.max_num_steps)


def build(config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs) -> GRPOTrainer:
    """A trainer that is ready to run, resumed if there is a checkpoint. What it started ends with the stack."""
    uses_reference = not config.grpo.skip_reference_policy_logprobs_calculation
    setup = build_rollouts(config, stack, inputs, init_reference_model=uses_reference)
    return start_trainer(GRPOTrainer(config, tools, setup.parts), config, stack, tools, inputs, setup)


class RolloutCollection(RolloutTrainer):
    """A step collects and records a generation batch. The weights stay those of `policy.model_name`."""

    def step(self) -> None:
        self.generated = []
        with self.phase(self.source.phase):
            groups = self.next_groups()
        environment_metrics = self.rollouts.environment_metrics(groups)
        self.record("train", environment_metrics | rollout_metrics(groups, current_weight_version=0))
        assert self.recorder is not None
        step = self.state.total_steps + 1
        self.recorder.record(step, groups, [], None, environment_metrics, weight_version=0)


def collect_rollouts(config: GRPOMasterConfig) -> int:
    """Collect and record `grpo.max_num_steps` batches; returns the exit status (see `run_command`)."""
    record = config.grpo.rollout_record.model_copy(update={"enabled": True})
    loop = {"val_period": 0, "val_at_start": False, "val_at_end": False}
    grpo = config.grpo.model_copy(update={"rollout_record": record, **loop})
    config = config.model_copy(update={"grpo": grpo, "checkpointing": CheckpointingConfig(enabled=False)})
    return launch(config, prepare=prepare_rollouts, build=_build_collection, num_steps=config.grpo.max_num_steps)


def _build_collection(
    config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs
) -> RolloutCollection:
    setup = build_rollouts(config, stack, inputs, init_reference_model=False)
    collection = RolloutCollection(config, tools, setup.parts)
    return start_trainer(collection, config, stack, tools, inputs, setup)
