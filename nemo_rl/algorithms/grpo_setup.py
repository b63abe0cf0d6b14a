"""From a configuration to a running GRPO: the only place that knows the concrete parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import xxhash
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer, NonFiniteLoss, TooManyFailures
from nemo_rl.algorithms.preflight import (
    check_checkpoint_dir,
    check_environments,
    check_metric_name,
    check_optimizer,
    check_prompts,
    check_saved_weights,
    check_writable,
)
from nemo_rl.algorithms.rollout_parts import rollout_settings, sampling_params
from nemo_rl.algorithms.trainer import RunTools
from nemo_rl.config.loader import dump_config
from nemo_rl.data.dataloader import PromptDataLoader, PromptDataset
from nemo_rl.data.processing import PromptProcessor
from nemo_rl.data.setup import DataSetup, setup_data
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import ResourceInsufficientError, WorkerError
from nemo_rl.distributed.pack_layout import NUM_HALVES
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.weight_transfer import RefitError
from nemo_rl.environments.registry import create_env, wait_for_envs
from nemo_rl.models.generation.interfaces import TENANT as GENERATION
from nemo_rl.models.generation.vllm_generation import VllmGeneration
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.models.policy.layout_checks import check_layout
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.refit import TENANT as REFIT
from nemo_rl.models.refit import Refit
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.types import Prompt
from nemo_rl.utils.checkpoint import CheckpointError, DiskFullError
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import LogError, Logger, get_next_experiment_dir
from nemo_rl.utils.seeds import seed_everything
from nemo_rl.utils.tokenizer import get_tokenizer
from nemo_rl.utils.venvs import VenvBuildError

logger = logging.getLogger(__name__)

COLOCATED_GROUPS = 3  # policy, generation and the rollout worker share each bundle
USER_ERRORS = (ValueError, FileNotFoundError, ResourceInsufficientError, VenvBuildError, CheckpointError)
RUN_ERRORS = (WorkerError, RefitError, TooManyFailures, NonFiniteLoss, DiskFullError, LogError)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is made from, checked."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    data: DataSetup
    prompts: PromptDataLoader
    identity: dict[str, Any]
    flops: ModelFlops


def run_grpo(config: GRPOMasterConfig) -> int:
    """Set up, train, tear down. Returns the exit status: 2 for what the user has to change, 1 for what broke."""
    console = RunConsole(num_steps=config.grpo.max_num_steps)
    console.configure_logging()
    run_dir: Path | None = None
    try:
        inputs = prepare(config)
        run_dir = get_next_experiment_dir(config.logger.log_dir)
        with setup(config, inputs, run_dir, console) as trainer:
            trainer.train()
    except RUN_ERRORS as error:
        console.error(
            f"{error}\nthe run's files are in {run_dir}; the same command resumes from the last checkpoint, if there "
            "is one"
        )
        return 1
    except USER_ERRORS as error:
        console.error(str(error))
        return 2
    except KeyboardInterrupt:
        console.warn("interrupted; the same command resumes from the last checkpoint, if there is one")
        return 130
    console.info(f"done; metrics and configuration are in {run_dir}")
    return 0


def prepare(config: GRPOMasterConfig) -> Inputs:
    """Load what needs no worker, and find what is wrong with it.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    seed_everything(config.grpo.seed)
    model_path = resolve_model(config.policy.model_name)
    model = read_model_config(config.policy, model_path)
    tokenizer_path = resolve_model(config.policy.tokenizer.name)
    tokenizer = get_tokenizer(config.policy.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(config.policy, model, tokenizer)
    check_layout(config.policy, model)
    check_metric_name(config.checkpointing, model)
    check_optimizer(config)
    data = setup_data(config.data, config.env)
    check_environments(config, data)
    prompts = PromptDataLoader(
        data.train, config.grpo.num_prompts_per_batch, shuffle=config.data.shuffle, seed=config.grpo.seed
    )
    process = PromptProcessor(data.tasks, tokenizer, config.data.max_input_seq_length)
    check_prompts(process, data.train, "training")
    if data.validation is not None and config.grpo.validates:
        check_prompts(process, data.validation, "validation")
    who = identity(config, model, tokenizer, data)
    check_checkpoint_dir(config.checkpointing, who)
    check_saved_weights(config, model)
    check_writable(Path(config.logger.log_dir), "logger.log_dir")
    return Inputs(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        data=data,
        prompts=prompts,
        identity=who,
        flops=ModelFlops.of(model),
    )


@contextmanager
def setup(config: GRPOMasterConfig, inputs: Inputs, run_dir: Path, console: RunConsole) -> Iterator[GRPOTrainer]:
    """A trainer ready to run, resumed if there is a checkpoint; everything it started ends with the block."""
    tools = RunTools(
        logger=Logger(config.logger, run_dir),
        console=console,
        checkpointing=config.checkpointing,
        resolved_config_yaml=dump_config(config),
        identity=inputs.identity,
    )
    tools.logger.log_hyperparams(config.model_dump())
    with ExitStack() as stack:
        stack.callback(tools.logger.close)
        init_ray(str(run_dir))
        stack.callback(ray.shutdown)
        yield _build(config, stack, tools, inputs)


def _build(config: GRPOMasterConfig, stack: ExitStack, tools: RunTools, inputs: Inputs) -> GRPOTrainer:
    model_path, tokenizer, data = inputs.model_path, inputs.tokenizer, inputs.data
    cluster_config, use_gpu = config.cluster, config.cluster.use_gpus
    cluster = stack.enter_context(
        RayVirtualCluster(
            [cluster_config.workers_per_node] * cluster_config.num_nodes,
            use_gpus=use_gpu,
            max_colocated_worker_groups=COLOCATED_GROUPS,
            num_gpus_per_node=cluster_config.gpus_per_node,
            name="grpo",
        )
    )
    train_sampling, val_sampling = sampling_params(config, tokenizer)
    accelerator = Accelerator(exclusive=use_gpu)
    # Begun here, so that they start while the models load.
    environments = {name: create_env(name, config.env[name]) for name in sorted(set(data.task_to_env.values()))}
    # The engine first: it measures the free memory of a device that nobody else uses yet.
    generation = VllmGeneration(
        cluster,
        config.policy.generation,
        model=model_path,
        tokenizer=inputs.tokenizer_path,
        seed=config.grpo.seed,
        hf_overrides=config.policy.hf_config_overrides,
        accelerator=accelerator,
        timeout_s=cluster_config.worker_timeout_s,
    )
    stack.callback(generation.shutdown)
    accelerator.release(GENERATION)
    policy = Policy(
        cluster,
        config.policy,
        tokenizer,
        accelerator,
        model_path=model_path,
        sampling=train_sampling,
        seed=config.grpo.seed,
        use_gpu=use_gpu,
        workers_per_node=cluster_config.workers_per_node,
        timeout_s=cluster_config.worker_timeout_s,
        init_reference_model=not config.grpo.skip_reference_policy_logprobs_calculation,
    )
    stack.callback(policy.shutdown)

    # During a refit both sides' weights are on the device; neither the optimizer state nor the KV cache is.
    def onload_both() -> None:
        policy.onload_weights()
        generation.onload(["weights"])

    accelerator.register(REFIT, onload=onload_both, offload=policy.offload)
    refit = Refit(
        policy,
        generation,
        accelerator,
        transport="packed_ipc" if use_gpu else "packed_shm",
        wire_dtype=config.policy.generation.vllm_cfg.precision,
        bucket_bytes=int(config.policy.refit_buffer_size_gb * 2**30) // NUM_HALVES,
    )
    wait_for_envs(environments)
    rollouts = RolloutCollector(
        cluster,
        rollout_settings(config, tokenizer, data, environments),
        generation.workers,
        accelerator,
        timeout_s=cluster_config.worker_timeout_s,
    )
    stack.callback(rollouts.shutdown)
    validation = data.validation if config.grpo.validates else None
    trainer = GRPOTrainer(
        config,
        tools,
        policy=policy,
        generation=generation,
        refit=refit,
        rollouts=rollouts,
        prompts=inputs.prompts,
        validation_prompts=first_prompts(validation, config.grpo.max_val_samples),
        train_sampling=train_sampling,
        val_sampling=val_sampling,
        flops=inputs.flops,
    )
    trainer.start()
    return trainer


def identity(
    config: GRPOMasterConfig, model: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, data: DataSetup
) -> dict[str, Any]:
    """What a checkpoint must share with a run that continues it."""
    grpo, lora_cfg = config.grpo, config.policy.dtensor_cfg.lora_cfg
    adapters = {
        "enabled": True,
        "dim": lora_cfg.dim,
        "alpha": lora_cfg.alpha,
        "target_modules": "all" if lora_cfg.match_all_linear else sorted(lora_cfg.target_modules),
        "exclude_modules": sorted(lora_cfg.exclude_modules),
        "adapter_path": lora_cfg.adapter_path,
    }
    return {
        "policy.model": {"name": config.policy.model_name, "config_hash": digest(model.to_json_string())},
        "policy.dtensor_cfg.lora_cfg": adapters if lora_cfg.enabled else {},
        "policy.tokenizer": {
            "vocabulary_hash": digest(repr(sorted(tokenizer.get_vocab().items()))),
            "chat_template_hash": digest(str(tokenizer.chat_template)),
        },
        "data.train": data.train.fingerprint(),
        "grpo": {
            "seed": grpo.seed,
            "num_prompts_per_step": grpo.num_prompts_per_step,
            "num_generations_per_prompt": grpo.num_generations_per_prompt,
        },
    }


def digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def first_prompts(dataset: PromptDataset | None, num: int) -> list[Prompt]:
    """The first `num` prompts of a dataset, all of a smaller one."""
    return [dataset[index] for index in range(min(num, len(dataset)))] if dataset is not None else []
