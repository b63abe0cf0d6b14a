"""The parts of a run that trains from recorded rollouts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.model_inputs import ModelInputs
from nemo_rl.algorithms.setup.rollout_parts import rollout_settings, sampling_params
from nemo_rl.algorithms.setup.workers import start_policy
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts
from nemo_rl.data.rows.dataloader import PromptDataLoader
from nemo_rl.data.rows.setup import DataSetup
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.rollouts.collector import NoWeightSync, RecordedRollouts


def build_replay_parts(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: ModelInputs,
    data: DataSetup,
    prompts: PromptDataLoader,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
    *,
    init_reference_model: bool,
) -> RolloutParts:
    """Start the policy, and a worker that reads the record of `replay_from`; both end with the stack."""
    assert config.rollout.replay_from is not None
    train_sampling, val_sampling = sampling_params(config, model.tokenizer)
    policy = start_policy(
        config,
        config.policy,
        stack,
        model,
        cluster,
        accelerator,
        seed=config.rollout.seed,
        sampling=train_sampling,
        init_reference_model=init_reference_model,
    )
    rollouts = RecordedRollouts(
        cluster,
        rollout_settings(config, model.tokenizer, data, environments={}),
        accelerator,
        root=Path(config.rollout.replay_from),
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(rollouts.shutdown)
    return RolloutParts(
        policy=policy,
        generation=None,
        refit=NoWeightSync(),
        rollouts=rollouts,
        prompts=prompts,
        validation_prompts=[],
        train_sampling=train_sampling,
        val_sampling=val_sampling,
        flops=model.flops,
    )
