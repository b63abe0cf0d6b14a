"""From a configuration to the parts of a run that samples: the only place that knows the concrete ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.generation import (
    Place,
    generation_place,
    num_generation_groups,
    start_hf_generation,
    start_vllm_generation,
)
from nemo_rl.algorithms.setup.model_inputs import ModelInputs, prepare_model
from nemo_rl.algorithms.setup.preflight import (
    check_checkpoint_dir,
    check_environment_inputs,
    check_environments,
    check_prompts,
    check_reward_models,
    check_saved_weights,
    check_turns,
    check_writable,
    sections_to_start,
)
from nemo_rl.algorithms.setup.replay import build_replay_parts
from nemo_rl.algorithms.setup.rollout_parts import rollout_settings, sampling_params
from nemo_rl.algorithms.setup.serve import token_of
from nemo_rl.algorithms.setup.workers import start_cluster
from nemo_rl.algorithms.trainers.rollout_recorder import check_record, check_record_folder, record_identity
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts
from nemo_rl.data.rows.dataloader import PromptDataLoader, PromptDataset
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor, setup_data
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import create_envs, wait_for_envs
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.types import Prompt
from nemo_rl.utils.seeds import seed_everything

POLICY_GROUPS = 1  # on each bundle that trains, beside those that generate there and further ones


@dataclass(frozen=True, kw_only=True)
class RolloutInputs:
    """What a run that samples is made from, checked."""

    model: ModelInputs
    data: DataSetup
    prompts: PromptDataLoader
    identity: dict[str, Any]


def prepare_rollouts(config: RolloutMasterConfig, own_identity: Mapping[str, Any] | None = None) -> RolloutInputs:
    """Load what needs no worker, and find what is wrong with it.

    `own_identity`: what else a checkpoint of the algorithm must share with a run that continues it.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    rollout = config.rollout
    seed_everything(rollout.seed)
    model = prepare_model(config.policy, config.checkpointing)
    data = setup_data(config.data, config.env)
    check_environments(config, data)
    if rollout.replay_from is None:
        check_environment_inputs(config.env, data.task_to_env.values())
    prompts = PromptDataLoader(
        data.train,
        rollout.num_prompts_per_batch,
        shuffle=config.data.shuffle,
        seed=rollout.seed,
        size_key=f"{config.section}.num_prompts_per_step",
    )
    process = PromptProcessor(data.tasks, model.tokenizer, config.data.max_input_seq_length)
    check_turns(config, model.tokenizer)
    check_prompts(process, data.train, "training")
    check_reward_models(config, data, process)
    if data.validation is not None and rollout.validates:
        check_prompts(process, data.validation, "validation")
    shape = {name: getattr(rollout, name) for name in ("seed", "num_prompts_per_step", "num_generations_per_prompt")}
    identity = {
        **model.identity,
        "data.train": data.train.fingerprint(),
        config.section: shape,
        **(own_identity or {}),
    }
    if rollout.replay_from is not None:
        key = f"{config.section}.replay_from"
        check_record(Path(rollout.replay_from), record_identity(config, identity), key)
        identity[key] = str(Path(rollout.replay_from).absolute())
    if rollout.rollout_record.enabled:
        key, root = f"{config.section}.rollout_record.save_dir", Path(rollout.rollout_record.save_dir)
        check_record_folder(root.absolute(), record_identity(config, identity), key)
        check_writable(root, key)
    check_checkpoint_dir(config.checkpointing, identity)
    check_saved_weights(config.checkpointing, config.policy, model.config)
    check_writable(Path(config.logger.log_dir), "logger.log_dir")
    if config.policy.generation.vllm_cfg.expose_http_server:
        token_of(config.policy.generation.vllm_cfg.http_server)
    return RolloutInputs(model=model, data=data, prompts=prompts, identity=identity)


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """Running parts, and what further groups on the same bundles are made with."""

    cluster: RayVirtualCluster
    generation_cluster: RayVirtualCluster
    accelerator: Accelerator
    parts: RolloutParts


def build_rollouts(
    config: RolloutMasterConfig,
    stack: ExitStack,
    inputs: RolloutInputs,
    *,
    init_reference_model: bool,
    num_further_groups: int = 0,
) -> RolloutSetup:
    """Start cluster, environments, engines, policy and rollout worker; all end with the stack.

    `num_further_groups` more worker groups have room on every bundle that trains.
    """
    # What reads a record sits where the policy is, like colocated generation.
    is_beside = config.policy.generation.colocated.enabled or config.rollout.replay_from is not None
    generating_groups = num_generation_groups(config) if is_beside else 0
    cluster = start_cluster(config, stack, POLICY_GROUPS + generating_groups + num_further_groups)
    data, rollout = inputs.data, config.rollout
    train_sampling, val_sampling = sampling_params(config, inputs.model.tokenizer)
    accelerator = Accelerator(exclusive=config.cluster.use_gpus)
    if rollout.replay_from is not None:
        parts = build_replay_parts(
            config,
            stack,
            inputs.model,
            data,
            inputs.prompts,
            cluster,
            accelerator,
            init_reference_model=init_reference_model,
        )
        return RolloutSetup(cluster=cluster, generation_cluster=cluster, accelerator=accelerator, parts=parts)
    place = generation_place(config, stack, Place(cluster=cluster, accelerator=accelerator))
    # Begun here, so that they start while the models load.
    environments = create_envs(sections_to_start(config.env, data.task_to_env.values()), cluster)
    is_by_policy = config.policy.generation.is_by_policy
    start = start_hf_generation if is_by_policy else partial(start_vllm_generation, place=place)
    policy, generation, refit = start(
        config,
        stack,
        inputs.model,
        cluster,
        accelerator,
        sampling=train_sampling,
        init_reference_model=init_reference_model,
    )
    wait_for_envs(environments, config.cluster.worker_timeout_s)
    rollouts = RolloutCollector(
        place.cluster,
        rollout_settings(config, inputs.model.tokenizer, data, environments),
        generation.workers,
        place.accelerator,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(rollouts.shutdown)
    validation = data.validation if rollout.validates else None
    parts = RolloutParts(
        policy=policy,
        generation=generation,
        refit=refit,
        rollouts=rollouts,
        prompts=inputs.prompts,
        validation_prompts=first_prompts(validation, rollout.max_val_samples),
        train_sampling=train_sampling,
        val_sampling=val_sampling,
        flops=inputs.model.flops,
    )
    return RolloutSetup(cluster=cluster, generation_cluster=place.cluster, accelerator=accelerator, parts=parts)


def first_prompts(dataset: PromptDataset | None, num: int) -> list[Prompt]:
    """`num` prompts of a dataset, all of a smaller one: of each of its parts the first, as evenly as they are long."""
    if dataset is None:
        return []
    taken = [0] * len(dataset.parts)
    for _ in range(min(num, len(dataset))):
        open_parts = [number for number, part in enumerate(dataset.parts) if taken[number] < len(part)]
        taken[min(open_parts, key=lambda number: taken[number])] += 1
    return [dataset[dataset.start_of(number) + i] for number, count in enumerate(taken) for i in range(count)]
