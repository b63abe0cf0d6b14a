"""Runs that sample and do not train.

`diagnose` names the reason why training and generation disagree on a checkpoint. `collect_rollouts` records rollouts.
"""

from pathlib import Path

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.rollout import RolloutRecordConfig
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.parts.devices import RolloutDevices
from nemo_rl.algorithms.parts.rollouts import Rollouts
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.disagreement import Cause, Diagnosis, investigate
from nemo_rl.algorithms.trainers.metrics import rollout_metrics
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.config.rules import round_up
from nemo_rl.utils.config import CheckpointingConfig

NUM_PROMPTS = 8  # at least
UNTRAINED = {
    "val_period": 0,
    "val_at_start": False,
    "val_at_end": False,
    "skip_reference_policy_logprobs_calculation": True,
    "replay_from": None,
}
"""Keys of `grpo` in these runs: no validation, no reference policy, fresh samples."""


class DiagnosticRun(RolloutTrainer):
    """One step samples answers with the weights of a checkpoint, and compares training and generation on them."""

    def __init__(
        self,
        config: GRPOMasterConfig,
        tools: RunTools,
        parts: RolloutParts,
        *,
        checkpoint: Path | None,
        found: list[Diagnosis],
    ) -> None:
        super().__init__(config, tools, parts)
        self.checkpoint = checkpoint
        self.found = found

    def start(self) -> None:
        if self.checkpoint is not None:
            self.policy.load_checkpoint(self.checkpoint, load_optimizer=False)
        super().start()

    def step(self) -> None:
        groups = self.sample()
        sampled = [group.row_values([[s.has_reward] * len(s.rows) for s in group.samples]) for group in groups]
        self.plan_and_load(groups, [[0.0] * len(group.rows) for group in groups], sampled, will_sync=False)
        with self.phase("investigation"):
            diagnosis = investigate(self.sides(), groups, trained_version=0)
        path = self.tools.logger.log_text(diagnosis.to_json(), "disagreement.json")
        show = self.tools.console.info if diagnosis.cause is Cause.ROUNDING else self.tools.console.warn
        show(f"{diagnosis}\n  all    {path}")
        self.found.append(diagnosis)


def diagnostic_config(config: GRPOMasterConfig) -> GRPOMasterConfig:
    """One step of one generation batch, with one sample of each prompt, for a configuration of a training run."""
    num_prompts = round_up(NUM_PROMPTS, config.training_cluster.num_workers)
    grpo = UNTRAINED | {
        "num_prompts_per_step": num_prompts,
        "num_generations_per_prompt": 1,
        "batch_multiplier": 1.0,
        "max_num_steps": 1,
        "rollout_record": RolloutRecordConfig(),  # the folder holds the rollouts of the run
    }
    update = {
        "grpo": config.grpo.model_copy(update=grpo),
        "policy": config.policy.model_copy(update={"train_global_batch_size": num_prompts}),
        "checkpointing": CheckpointingConfig(enabled=False),
    }
    return config.model_copy(update=update)


def diagnose(config: GRPOMasterConfig, checkpoint: Path | None) -> int:
    """Compare policy and engine with the weights of `checkpoint`, a step folder; None: of `policy.model_name`.

    Returns 0 if they agree, 1 if a cause is named, else the exit status of the run.
    """
    found: list[Diagnosis] = []
    config = diagnostic_config(config)
    with Run(config) as run:
        rollouts = Rollouts.prepare(config)
        run.start(rollouts.saves)
        parts = rollouts.start(run, RolloutDevices.start(run))
        run.train(DiagnosticRun(run.config, run.tools, parts, checkpoint=checkpoint, found=found))
    return run.status or int(any(diagnosis.cause is not Cause.ROUNDING for diagnosis in found))


class RolloutCollection(RolloutTrainer):
    """A step collects and records a generation batch. The weights of `policy.model_name` stay as they are."""

    def step(self) -> None:
        groups = self.sample()
        environment_metrics = self.rollouts.environment_metrics(groups)()
        self.record("train", environment_metrics | rollout_metrics(groups, current_weight_version=0))
        assert self.rollout_recorder is not None
        step = self.state.total_steps + 1
        self.rollout_recorder.record(step, groups, [], None, environment_metrics, weight_version=0)


def collect_rollouts(config: GRPOMasterConfig) -> int:
    """Collect and record `grpo.max_num_steps` batches; returns the exit status (see `Command`)."""
    record = config.grpo.rollout_record.model_copy(update={"enabled": True})
    grpo = config.grpo.model_copy(update={"rollout_record": record, **UNTRAINED})
    config = config.model_copy(update={"grpo": grpo, "checkpointing": CheckpointingConfig(enabled=False)})
    with Run(config) as run:
        rollouts = Rollouts.prepare(config)
        run.start(rollouts.saves)
        parts = rollouts.start(run, RolloutDevices.start(run))
        run.train(RolloutCollection(run.config, run.tools, parts))
    return run.status
