"""Combinations of sections that cannot work in a run, found before anything starts.

Each check yields (dotted key, message); the message says which values would work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.config.metric_names import Sections, check_metric_names, divisors, near
from nemo_rl.algorithms.config.rollout import division_problems, kind_of_devices
from nemo_rl.algorithms.plan.batch import check_batching
from nemo_rl.config.errors import nearest_key
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.environments.config import (
    ENV_REGISTRY,
    PythonToolsEnvironmentConfig,
    RetrievalEnvironmentConfig,
    SlidingPuzzleEnvironmentConfig,
    check_sections,
    named_sections,
)
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.layout import training_problems, training_sizes
from nemo_rl.models.policy.megatron.config import device_problems

if TYPE_CHECKING:
    from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig, GRPOMasterConfig
    from nemo_rl.algorithms.config.loop import LoopConfig
    from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
    from nemo_rl.utils.config import CheckpointingConfig

# -- What the backend of generation cannot be combined with, found before anything starts.
#
# Each check yields (dotted key, message); the message says which values would work.

Problems = Iterator[tuple[str, str]]


def check_http_server(cfg: RolloutMasterConfig) -> Problems:
    """Whether there are engines that answer at any time."""
    generation, key = cfg.policy.generation, "policy.generation.vllm_cfg.expose_http_server"
    if not generation.vllm_cfg.expose_http_server:
        return
    if cfg.rollout.replay_from is not None:
        yield key, f"no engine is started with {cfg.section}.replay_from; set it to false"
    elif generation.is_by_policy:
        yield (
            key,
            "nobody answers while the policy trains where its own workers generate; set it to false, or "
            "policy.generation.backend=vllm",
        )
    elif cfg.cluster.use_gpus and generation.colocated.enabled:
        yield (
            key,
            "colocated engines sleep while the policy trains; set policy.generation.colocated.enabled=false and its "
            "resources, or this to false",
        )


def check_precision(cfg: RolloutMasterConfig) -> Problems:
    """Whether the engines' devices can do what is asked of them."""
    vllm = cfg.policy.generation.vllm_cfg
    if not cfg.cluster.use_gpus and not cfg.policy.generation.is_by_policy:
        for asked in vllm.gpu_only:
            key, _, value = asked.partition("=")
            works = f"policy.precision={cfg.policy.precision}" if key == "precision" else "auto"
            yield f"policy.generation.vllm_cfg.{key}", f"{value} runs on GPUs only; use {works}"


def check_router_replay(cfg: RolloutMasterConfig) -> Problems:
    """Whether the engines say which experts every token went through, where training takes these."""
    for model in cfg.further_models:
        if model.config.router_replay.enabled:
            yield f"{model.key}.router_replay.enabled", "its experts are not those that generated; set it to false"
    if not cfg.policy.router_replay.enabled or cfg.rollout.replay_from is not None:
        return
    generation, why = cfg.policy.generation, "asked for by policy.router_replay.enabled=true"
    if generation.is_by_policy:
        yield (
            "policy.router_replay.enabled",
            f"policy.generation.backend={generation.backend} does not say which experts a token went through; set it "
            "to false, or policy.generation.backend=vllm",
        )
        return
    vllm = generation.vllm_cfg
    if vllm.pipeline_parallel_size > 1:
        yield (
            "policy.generation.vllm_cfg.pipeline_parallel_size",
            f"{vllm.pipeline_parallel_size}: engines of one stage alone return the experts of tokens, {why}; set it "
            "to 1",
        )
    if cfg.cluster.use_gpus and not vllm.enable_prefix_caching:
        yield (
            "policy.generation.vllm_cfg.enable_prefix_caching",
            f"vLLM returns the experts of tokens, {why}, only with a prefix cache; set it to true",
        )


def check_backend(cfg: RolloutMasterConfig) -> Problems:
    """Whether the policy's layout, and everything that is set of generation, goes with the backend."""
    generation = cfg.policy.generation
    if not generation.is_by_policy:
        return
    backend, trains_with = generation.backend, cfg.policy.backend_key
    if trains_with != ("megatron_cfg" if backend == "megatron" else "dtensor_cfg"):
        wanted = "megatron_cfg" if backend == "megatron" else "dtensor_cfg"
        yield (
            "policy.generation.backend",
            f"{backend} is for a policy that trains with policy.{wanted}; set policy.{wanted}.enabled=true and "
            f"policy.{trains_with}.enabled=false, or policy.generation.backend=vllm",
        )
        return
    why = f"the policy's own workers generate (policy.generation.backend={backend})"
    yield from _check_layout(cfg.policy, why)
    if generation.vllm_cfg.precision != cfg.policy.precision:
        yield (
            "policy.generation.vllm_cfg.precision",
            f"{why}, in policy.precision={cfg.policy.precision}; remove the key, or set policy.generation.backend=vllm",
        )
    if generation.vllm_cfg.tensor_parallel_size != 1:
        name = "tensor_parallel_size" if backend == "hf" else "tensor_model_parallel_size"
        yield (
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{why}, cut as policy.{trains_with}.{name} says; remove the key",
        )
    if generation.vllm_kwargs:
        yield (
            "policy.generation.vllm_kwargs",
            f"{why}, which know none of {', '.join(generation.vllm_kwargs)}; remove them",
        )
    if not generation.colocated.enabled:
        yield (
            "policy.generation.colocated.enabled",
            f"{why}: they have no resources of their own; set it to true, or policy.generation.backend=vllm",
        )


def _check_layout(policy: PolicyConfig, why: str) -> Problems:
    """Whether the ranks that train can draw single tokens, each data-parallel rank for itself."""
    dtensor, megatron = policy.dtensor_cfg, policy.megatron_cfg
    if policy.backend_key == "megatron_cfg":
        sizes = {
            "pipeline_model_parallel_size": (megatron.pipeline_model_parallel_size, "pipeline stages"),
            "context_parallel_size": (megatron.context_parallel_size, "sequences cut over ranks"),
            "expert_model_parallel_size": (megatron.expert_model_parallel_size, "experts on different ranks"),
            "expert_tensor_parallel_size": (megatron.expert_tensor_parallel_size, "experts cut over ranks"),
        }
    else:
        sizes = {
            "pipeline_parallel_size": (dtensor.pipeline_parallel_size, "pipeline stages"),
            "context_parallel_size": (dtensor.context_parallel_size, "sequences cut over ranks"),
            "expert_parallel_size": (dtensor.expert_parallel_size, "experts on different ranks"),
        }
    for name, (size, what) in sizes.items():
        if size > 1:
            yield (
                f"policy.{policy.backend_key}.{name}",
                f"not supported yet: {what} where {why}; set it to 1, or policy.generation.backend=vllm",
            )
    if policy.backend_key == "megatron_cfg" and megatron.fp8_cfg.enabled:
        yield (
            "policy.megatron_cfg.fp8_cfg.enabled",
            f"not supported yet: products in FP8 where {why}; set it to false, or policy.generation.backend=vllm",
        )
    if policy.backend_cfg.sequence_parallel:
        yield (
            f"policy.{policy.backend_key}.sequence_parallel",
            f"single tokens cannot be cut over ranks, and {why}; set it to false, or policy.generation.backend=vllm",
        )


Problems = Iterator[tuple[str, str]]


def check_rollout_run(cfg: RolloutMasterConfig) -> Problems:
    """What every algorithm that samples has to hold to."""
    yield from division_problems(cfg.cluster, cfg.policy.generation.colocated)
    yield from check_rollout_batches(cfg, cfg.policy)
    yield from check_layout(cfg.policy, cfg.training_cluster)
    yield from check_saving(cfg.checkpointing, cfg.policy)
    for model in cfg.further_models:
        yield from check_layout(model.config, model.cluster, model.key)
    yield from check_engines(cfg)
    yield from check_backend(cfg)
    yield from check_http_server(cfg)
    yield from check_precision(cfg)
    yield from check_router_replay(cfg)
    yield from check_sampling(cfg)
    yield from check_lengths(cfg)
    unknown = list(check_env_names(cfg))
    yield from unknown
    yield from check_environments(cfg)
    yield from check_validation(cfg, cfg.rollout, cfg.data.has_validation)
    yield from check_replay(cfg)
    if not unknown:  # names of tasks, and with them of metrics, follow from the environments
        # What an environment reports of itself is not known before it runs.
        yield from check_metric_names(cfg, cfg.rollout, free_prefixes=cfg.env)


def check_grpo(cfg: GRPOMasterConfig) -> Problems:
    """All of a GRPO run."""
    yield from check_rollout_run(cfg)
    yield from check_loss(cfg)
    yield from check_async(cfg)


def check_rollout_batches(cfg: RolloutMasterConfig, policy: PolicyConfig, key: str = "policy") -> Problems:
    """Whether the samples of a step are shared out evenly to the optimizer steps and ranks of the model `key`."""
    rollout, section, global_batch = cfg.rollout, cfg.section, policy.train_global_batch_size
    samples = rollout.num_samples_per_step
    if samples % global_batch:
        yield (
            f"{key}.train_global_batch_size",
            f"{global_batch} does not divide the {samples} samples of a step ({section}.num_prompts_per_step="
            f"{rollout.num_prompts_per_step} x num_generations_per_prompt={rollout.num_generations_per_prompt}); "
            f"these would: {near(divisors(samples), global_batch)}",
        )
    num_ranks = data_parallel_size(policy, cfg.training_cluster)
    multiples = [size for size in divisors(samples) if num_ranks is not None and size % num_ranks == 0]
    fix = f"these would: {near(multiples, global_batch)}"
    if not multiples:
        prompts = rollout.num_prompts_per_step
        fix = f"make it and {section}.num_prompts_per_step (now {prompts}) multiples of {num_ranks}"
    yield from check_batch_size(policy, cfg.training_cluster, fix=fix, key=key)


def data_parallel_size(policy: PolicyConfig, cluster: ClusterConfig) -> int | None:
    """Ranks that hold different samples; None where the layout does not fit the cluster (`check_layout` says why)."""
    if list(training_problems(policy, cluster.num_workers)):
        return None
    return training_sizes(policy, cluster.num_workers).data_parallel


def check_batch_size(
    policy: PolicyConfig, cluster: ClusterConfig, *, fix: str, key: str = "policy", sequences_per_sample: int = 1
) -> Problems:
    """Whether `train_global_batch_size` is shared out evenly to ranks and micro-batches; `fix` where it is not."""
    num_ranks = data_parallel_size(policy, cluster)
    if num_ranks is None:
        return
    if policy.train_global_batch_size % num_ranks:
        text = f"{policy.train_global_batch_size} cannot be shared by {num_ranks} training ranks; {fix}"
        yield f"{key}.train_global_batch_size", text
        return
    for problem, message in check_batching(
        policy,
        num_ranks=num_ranks,
        micro_batch_multiple=policy.backend_cfg.micro_batch_multiple,
        sequences_per_sample=sequences_per_sample,
        key=key,
    ):
        yield f"{key}.{problem}", message


def check_layout(policy: PolicyConfig, cluster: ClusterConfig, key: str = "policy") -> Problems:
    """Whether the ranks of a policy can be arranged as asked."""
    for problem, message in training_problems(policy, cluster.num_workers):
        yield f"{key}.{problem}", message
    if policy.megatron_cfg.enabled:
        for problem, message in device_problems(policy.megatron_cfg, use_gpus=cluster.use_gpus):
            yield f"{key}.megatron_cfg.{problem}", message


def check_saving(checkpointing: CheckpointingConfig, policy: PolicyConfig, key: str = "policy") -> Problems:
    """Whether what trains the model `key` can be saved as asked."""
    if checkpointing.enabled and checkpointing.model_save_format == "safetensors" and policy.megatron_cfg.enabled:
        yield (
            "checkpointing.model_save_format",
            f"safetensors hold one part of a tensor per rank, and those of {key}.megatron_cfg hold several; set it to "
            "torch_save (checkpointing.save_consolidated=true writes safetensors besides)",
        )
    is_offloaded = policy.megatron_cfg.enabled and policy.megatron_cfg.optimizer.optimizer_cpu_offload
    if checkpointing.enabled and is_offloaded and policy.precision == "float32":
        yield (
            f"{key}.megatron_cfg.optimizer.optimizer_cpu_offload",
            f"not supported yet: checkpoints of it with {key}.precision=float32; set that to bfloat16, or this false",
        )


def check_engines(cfg: RolloutMasterConfig) -> Problems:
    """Whether engines fill the machines."""
    vllm, cluster = cfg.policy.generation.vllm_cfg, cfg.generation_cluster
    size, num_workers, per_node = vllm.engine_size, cluster.num_workers, cluster.workers_per_node
    kind, section = kind_of_devices(cluster), "policy.generation.vllm_cfg"
    which = "of the cluster" if cfg.policy.generation.colocated.enabled else "that generate"
    key, text = f"{section}.tensor_parallel_size", str(size)
    if vllm.pipeline_parallel_size > 1:
        key = f"{section}.pipeline_parallel_size"
        text = f"{vllm.pipeline_parallel_size} x tensor_parallel_size={vllm.tensor_parallel_size} = {size}"
    if num_workers % size:
        works = near(divisors(num_workers), size)
        yield key, f"{text} does not divide the {num_workers} {kind} {which}; these would: {works}"
    elif size <= per_node and per_node % size:
        works = near(divisors(per_node), size)
        yield key, f"engines of {text} do not fill nodes of {per_node} {kind}; these would: {works}"
    elif size > per_node:
        yield from _check_spanning_engines(cfg, size, text, key)


def _check_spanning_engines(cfg: RolloutMasterConfig, size: int, text: str, key: str) -> Problems:
    """Whether engines that are larger than a node have whole nodes, between which only pipeline stages lie."""
    vllm, per_node = cfg.policy.generation.vllm_cfg, cfg.generation_cluster.workers_per_node
    kind = kind_of_devices(cfg.cluster)
    if cfg.policy.generation.colocated.enabled:
        yield (
            key,
            f"not supported yet: an engine of {text} spans nodes of {per_node} {kind}; use at most that, or "
            "policy.generation.colocated.enabled=false",
        )
    elif per_node % vllm.tensor_parallel_size:
        works = near(divisors(per_node), vllm.tensor_parallel_size)
        yield (
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"{vllm.tensor_parallel_size} devices that share every layer have to be on one node of {per_node} {kind}; "
            f"set it to one of {works}, and pipeline_parallel_size to lead over nodes",
        )
    elif size % per_node:
        yield key, f"an engine of {text} does not fill nodes of {per_node} {kind}; make it a multiple of {per_node}"


def check_sampling(cfg: RolloutMasterConfig) -> Problems:
    """Whether one can train on what is sampled."""
    generation = cfg.policy.generation
    if generation.temperature == 0:
        yield "policy.generation.temperature", "training needs a temperature above 0; only val_temperature may be 0"
    if cfg.policy.deterministic and cfg.cluster.use_gpus and generation.top_p < 1:
        yield (
            "policy.deterministic",
            "cannot be had with policy.generation.top_p on GPUs, whose cumulative sums come in any order; set top_p=1 "
            "or deterministic=false",
        )


def check_lengths(cfg: RolloutMasterConfig) -> Problems:
    longest_prompt, longest = cfg.data.max_input_seq_length, cfg.policy.generation.vllm_cfg.max_model_len
    if longest_prompt > longest:
        yield (
            "data.max_input_seq_length",
            f"{longest_prompt} is more than policy.generation.vllm_cfg.max_model_len={longest}: such prompts could "
            f"never be answered; use at most that",
        )


def check_loss(cfg: GRPOMasterConfig) -> Problems:
    loss, grpo = cfg.loss_fn, cfg.grpo
    yield from check_reference_kl(cfg, loss, skips_reference=grpo.skip_reference_policy_logprobs_calculation)
    num_updates = grpo.num_samples_per_step / cfg.policy.train_global_batch_size
    if loss.force_on_policy_ratio and num_updates != 1:
        yield (
            "loss_fn.force_on_policy_ratio",
            f"needs exactly one optimizer step per RL step; set policy.train_global_batch_size="
            f"{grpo.num_samples_per_step} (num_prompts_per_step x num_generations_per_prompt)",
        )
    if loss.use_kl_in_reward and grpo.adv_estimator.name != "reinforce_plus_plus":
        yield "loss_fn.use_kl_in_reward", "only grpo.adv_estimator.name=reinforce_plus_plus has the KL in the reward"


def check_async(cfg: GRPOMasterConfig) -> Problems:
    """What sampling beside training needs."""
    if not cfg.grpo.async_grpo.enabled:
        return
    if cfg.policy.generation.is_by_policy:
        yield (
            "grpo.async_grpo.enabled",
            "nothing samples while the policy trains where its own workers generate; set it to false, or "
            "policy.generation.backend=vllm",
        )
        return
    if cfg.policy.generation.colocated.enabled:
        yield (
            "grpo.async_grpo.enabled",
            "samples while the policy trains, so generation needs devices of its own: set "
            "policy.generation.colocated.enabled=false and its resources",
        )
    if not cfg.loss_fn.use_importance_sampling_correction:
        yield (
            "loss_fn.use_importance_sampling_correction",
            "samples come from older weights than those that are trained; set it to true, or "
            "grpo.async_grpo.enabled=false",
        )


def check_reference_kl(cfg: RolloutMasterConfig, loss: ClippedPGLossConfig, *, skips_reference: bool) -> Problems:
    """Whether the KL penalty, in the loss or in the reward, has what it needs."""
    generation = cfg.policy.generation
    if loss.reference_policy_kl_penalty != 0 and (generation.top_p < 1 or generation.top_k is not None):
        yield (
            "loss_fn.reference_policy_kl_penalty",
            "not supported yet: a KL penalty with policy.generation.top_p or top_k, which filter the policy and not "
            "the reference; set it to 0, or top_p=1 and top_k=null",
        )
    if skips_reference and loss.reference_policy_kl_penalty != 0:
        yield (
            f"{cfg.section}.skip_reference_policy_logprobs_calculation",
            f"the KL penalty needs them; set loss_fn.reference_policy_kl_penalty=0 "
            f"(it is {loss.reference_policy_kl_penalty})",
        )
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        yield "loss_fn.use_kl_in_reward", "has no effect without loss_fn.reference_policy_kl_penalty above 0"


def check_env_names(cfg: RolloutMasterConfig) -> Problems:
    """Whether every dataset names a section of `env`."""
    for name, datasets in (("train", cfg.data.train), ("validation", cfg.data.validation or [])):
        for index, dataset in enumerate(datasets):
            if dataset.env_name not in cfg.env:
                near = nearest_key(dataset.env_name, cfg.env)
                fix = f"did you mean {near}?" if near else f"there are: {', '.join(cfg.env) or 'none'}"
                key = f"data.{name}.{index}.env_name"
                yield key, f"no section env.{dataset.env_name}; {fix}"


def check_environments(cfg: RolloutMasterConfig) -> Problems:
    """Whether environments have the turns and the time that they need."""
    answering = [dataset.env_name for dataset in [*cfg.data.train, *(cfg.data.validation or [])]]
    for name in named_sections(cfg.env, [name for name in answering if name in cfg.env]):
        if name in cfg.env:
            yield from _check_type(name, cfg.env[name].type)
    for name in cfg.env:
        if name in answering:
            yield from _check_turns(cfg, name)
    yield from check_sections(cfg.env, cfg.rollout.env_step_timeout_s)


def _check_type(name: str, env_type: str) -> Problems:
    """Whether there may be such an environment; what an import path leads to is seen when it is imported."""
    if env_type in ENV_REGISTRY or "." in env_type or ":" in env_type:
        return
    near = nearest_key(env_type, ENV_REGISTRY)
    hint = f"did you mean {near}?" if near else f"there are: {', '.join(ENV_REGISTRY)}."
    text = f"no environment {env_type!r}; {hint} One of your own is an import path, e.g. my_package.envs:MyEnv"
    yield f"env.{name}.type", text


def _check_turns(cfg: RolloutMasterConfig, name: str) -> Problems:
    """Whether an episode can come to its end in the turns it has."""
    section, turns, key = cfg.env[name], cfg.rollout.max_rollout_turns, f"{cfg.section}.max_rollout_turns"
    if isinstance(section, RetrievalEnvironmentConfig):
        wanted = section.max_searches + 1
        if turns < 2:
            yield (
                key,
                f"1 leaves no turn to answer after a search of env.{name}; set it to {wanted}, for all searches and "
                "the answer",
            )
        elif turns < wanted:
            yield (
                key,
                f"{turns} leaves no turn to answer after the {section.max_searches} searches of env.{name}; set it to "
                f"at least {wanted}, or env.{name}.max_searches={turns - 1}",
            )
    elif isinstance(section, PythonToolsEnvironmentConfig) and turns < 2:
        yield (
            key,
            f"1 leaves no turn to read what a tool of env.{name} says; set it to at least 2, and to one more than the "
            "calls that an answer may need",
        )
    elif isinstance(section, SlidingPuzzleEnvironmentConfig):
        limits = [
            dataset.kwargs.get("max_moves") or section.cfg.max_moves
            for dataset in [*cfg.data.train, *(cfg.data.validation or [])]
            if dataset.env_name == name
        ]
        longest = max((limit for limit in limits if isinstance(limit, int)), default=0)
        if turns < longest:
            yield (
                key,
                f"{turns} cuts games of env.{name} off before their {longest} moves are made; set it to at least "
                f"{longest}, or env.{name}.cfg.max_moves={turns}",
            )


def check_replay(cfg: RolloutMasterConfig) -> Problems:
    """Whether a run that trains from recorded rollouts asks for what needs engines."""
    rollout, section = cfg.rollout, cfg.section
    if rollout.replay_from is None:
        return
    if not Path(rollout.replay_from).is_dir():
        yield (
            f"{section}.replay_from",
            f"there is no folder {rollout.replay_from!r} (looked in {Path.cwd()}); name the {section}.rollout_record."
            "save_dir of the run that recorded",
        )
    if rollout.validates:
        yield (
            f"{section}.replay_from",
            f"no engine is started that could answer validation prompts; set {section}.val_period=0, "
            f"{section}.val_at_start=false and {section}.val_at_end=false",
        )
    if rollout.rollout_record.enabled:
        yield f"{section}.rollout_record.enabled", "nothing is sampled with replay_from; set it to false"


def check_validation(cfg: Sections, loop: LoopConfig, has_data: bool) -> Problems:
    """Whether there is something to validate on."""
    if loop.validates and not has_data:
        asked = {"val_period=0": True, "val_at_start=false": loop.val_at_start, "val_at_end=false": loop.val_at_end}
        off = " and ".join(f"{cfg.section}.{setting}" for setting, is_asked in asked.items() if is_asked)
        yield (
            "data.validation",
            f"nothing to validate on ({cfg.section}.val_period={loop.val_period}, "
            f"val_at_start={_yaml(loop.val_at_start)}, val_at_end={_yaml(loop.val_at_end)}); name a dataset, set "
            f"split_validation_size of a training dataset, or switch validation off with {off}",
        )


def _yaml(value: bool) -> str:
    return "true" if value else "false"
