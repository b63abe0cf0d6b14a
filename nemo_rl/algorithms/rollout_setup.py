"""From a configuration to the parts of a run that samples: the only place that knows the concrete ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.model_inputs import ModelInputs, prepare_model
from nemo_rl.algorithms.preflight import (
    check_checkpoint_dir,
    check_environments,
    check_prompts,
    check_reward_models,
    check_saved_weights,
    check_writable,
)
from nemo_rl.algorithms.rollout_config import RolloutMasterConfig
from nemo_rl.algorithms.rollout_parts import rollout_settings, sampling_params
from nemo_rl.algorithms.rollout_trainer import RolloutParts
from nemo_rl.algorithms.worker_setup import start_cluster, start_policy
from nemo_rl.data.dataloader import PromptDataLoader, PromptDataset
from nemo_rl.data.processing import PromptProcessor
from nemo_rl.data.setup import DataSetup, setup_data
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.pack_layout import NUM_HALVES
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import create_envs, wait_for_envs
from nemo_rl.models.generation.interfaces import TENANT as GENERATION
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.generation.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.refit import TENANT as REFIT
from nemo_rl.models.refit import Refit
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.types import Prompt
from nemo_rl.utils.seeds import seed_everything

COLOCATED_GROUPS = 3  # policy, generation and the rollout worker share each bundle


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
    prompts = PromptDataLoader(
        data.train,
        rollout.num_prompts_per_batch,
        shuffle=config.data.shuffle,
        seed=rollout.seed,
        size_key=f"{config.section}.num_prompts_per_step",
    )
    process = PromptProcessor(data.tasks, model.tokenizer, config.data.max_input_seq_length)
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
    check_checkpoint_dir(config.checkpointing, identity)
    check_saved_weights(config.checkpointing, config.policy, model.config)
    check_writable(Path(config.logger.log_dir), "logger.log_dir")
    return RolloutInputs(model=model, data=data, prompts=prompts, identity=identity)


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """Running parts, and what further groups on the same bundles are made with."""

    cluster: RayVirtualCluster
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

    `num_further_groups` more worker groups have room on every bundle.
    """
    cluster = start_cluster(config, stack, COLOCATED_GROUPS + num_further_groups)
    data, rollout = inputs.data, config.rollout
    train_sampling, val_sampling = sampling_params(config, inputs.model.tokenizer)
    accelerator = Accelerator(exclusive=config.cluster.use_gpus)
    # Begun here, so that they start while the models load.
    environments = create_envs({name: config.env[name] for name in sorted(set(data.task_to_env.values()))}, cluster)
    # The engine first: it measures the free memory of a device that nobody else uses yet.
    generation = _start_generation(config, stack, inputs.model, cluster, accelerator)
    policy = start_policy(
        config,
        config.policy,
        stack,
        inputs.model,
        cluster,
        accelerator,
        seed=rollout.seed,
        sampling=train_sampling,
        init_reference_model=init_reference_model,
    )
    refit = _make_refit(config, policy, generation, accelerator)
    wait_for_envs(environments, config.cluster.worker_timeout_s)
    rollouts = RolloutCollector(
        cluster,
        rollout_settings(config, inputs.model.tokenizer, data, environments),
        generation.workers,
        accelerator,
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
    return RolloutSetup(cluster=cluster, accelerator=accelerator, parts=parts)


def _start_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: ModelInputs,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
) -> VllmGeneration:
    generation = VllmGeneration(
        cluster,
        config.policy.generation,
        model=model.model_path,
        tokenizer=model.tokenizer_path,
        seed=config.rollout.seed,
        hf_overrides=config.policy.hf_config_overrides,
        accelerator=accelerator,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(generation.shutdown)
    accelerator.release(GENERATION)
    return generation


def _make_refit(
    config: RolloutMasterConfig, policy: Policy, generation: GenerationInterface, accelerator: Accelerator
) -> Refit:
    # During a refit both sides' weights are on the device; neither the optimizer state nor the KV cache is.
    def onload_both() -> None:
        policy.onload_weights()
        generation.onload(["weights"])

    accelerator.register(REFIT, onload=onload_both, offload=policy.offload)
    return Refit(
        policy,
        generation,
        accelerator,
        transport="packed_ipc" if config.cluster.use_gpus else "packed_shm",
        wire_dtype=config.policy.generation.vllm_cfg.precision,
        bucket_bytes=int(config.policy.refit_buffer_size_gb * 2**30) // NUM_HALVES,
    )


def first_prompts(dataset: PromptDataset | None, num: int) -> list[Prompt]:
    """The first `num` prompts of a dataset, all of a smaller one."""
    return [dataset[index] for index in range(min(num, len(dataset)))] if dataset is not None else []
