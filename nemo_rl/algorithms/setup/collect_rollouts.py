"""Rollouts without training: the training prompts played with the policy's weights as they are, and recorded."""

from __future__ import annotations

from contextlib import ExitStack

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.setup.grpo import prepare
from nemo_rl.algorithms.setup.launch import launch
from nemo_rl.algorithms.setup.rollouts import RolloutInputs, build_rollouts
from nemo_rl.algorithms.setup.serve import start_openai_server
from nemo_rl.algorithms.trainers.metrics import rollout_metrics
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.utils.config import CheckpointingConfig


class RolloutCollection(RolloutTrainer):
    """A step is a generation batch. The weights are those of `policy.model_name`, and stay so."""

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
    """Play and record `grpo.max_num_steps` batches; returns the exit status (see `launch`)."""
    record = config.grpo.rollout_record.model_copy(update={"enabled": True})
    loop = {"val_period": 0, "val_at_start": False, "val_at_end": False}
    grpo = config.grpo.model_copy(update={"rollout_record": record, **loop})
    alone = {"grpo": grpo, "checkpointing": CheckpointingConfig(enabled=False)}
    return launch(config.model_copy(update=alone), prepare=prepare, build=build, num_steps=config.grpo.max_num_steps)


def build(config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: RolloutInputs) -> RolloutCollection:
    """Ready to play; everything it started ends with the stack."""
    setup = build_rollouts(config, stack, inputs, init_reference_model=False)
    collection = RolloutCollection(config, tools, setup.parts)
    collection.start()
    start_openai_server(config, stack, tools, inputs, setup)
    return collection
