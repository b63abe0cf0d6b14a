"""Combinations of sections that cannot work in a run, found before anything starts.

Each check yields (dotted key, message); the message says which values would work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl.algorithms.metric_names import Sections, check_metric_names, divisors, near
from nemo_rl.algorithms.rollout_batch import check_batching
from nemo_rl.config.errors import nearest_key
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.parallel_sizes import ParallelSizes, layout_problems

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import ClippedPGLossConfig, GRPOMasterConfig
    from nemo_rl.algorithms.loop_config import LoopConfig
    from nemo_rl.algorithms.rollout_config import RolloutMasterConfig

Problems = Iterator[tuple[str, str]]


def check_rollout_run(cfg: RolloutMasterConfig) -> Problems:
    """What every algorithm that samples has to hold to."""
    yield from check_rollout_batches(cfg, cfg.policy)
    yield from check_layout(cfg.policy, cfg.cluster)
    for model in cfg.further_models:
        yield from check_layout(model.config, model.cluster, model.key)
    yield from check_engines(cfg)
    yield from check_sampling(cfg)
    yield from check_lengths(cfg)
    yield from check_environments(cfg)
    yield from check_validation(cfg, cfg.rollout, cfg.data.has_validation)
    # What an environment reports of itself is not known before it runs.
    yield from check_metric_names(cfg, cfg.rollout, free_prefixes=cfg.env)


def check_grpo(cfg: GRPOMasterConfig) -> Problems:
    """All of a GRPO run."""
    yield from check_rollout_run(cfg)
    yield from check_loss(cfg)


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
    num_ranks = data_parallel_size(policy, cfg.cluster)
    multiples = [size for size in divisors(samples) if num_ranks is not None and size % num_ranks == 0]
    fix = f"these would: {near(multiples, global_batch)}"
    if not multiples:
        prompts = rollout.num_prompts_per_step
        fix = f"make it and {section}.num_prompts_per_step (now {prompts}) multiples of {num_ranks}"
    yield from check_batch_size(policy, cfg.cluster, fix=fix, key=key)


def data_parallel_size(policy: PolicyConfig, cluster: ClusterConfig) -> int | None:
    """Ranks that hold different samples; None where the layout does not fit the cluster (`check_layout` says why)."""
    if list(layout_problems(policy.dtensor_cfg, cluster.num_workers)):
        return None
    return ParallelSizes.of(policy.dtensor_cfg, cluster.num_workers).data_parallel


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
        micro_batch_multiple=policy.dtensor_cfg.micro_batch_multiple,
        sequences_per_sample=sequences_per_sample,
        key=key,
    ):
        yield f"{key}.{problem}", message


def check_layout(policy: PolicyConfig, cluster: ClusterConfig, key: str = "policy") -> Problems:
    """Whether the ranks of a policy can be arranged as asked."""
    if policy.sequence_packing.enabled and policy.padding_free is False:
        yield (
            f"{key}.padding_free",
            f"packed sequences lie end to end; set it to null, or {key}.sequence_packing.enabled=false and "
            f"{key}.dynamic_batching.enabled=true",
        )
    for problem, message in layout_problems(policy.dtensor_cfg, cluster.num_workers):
        yield f"{key}.dtensor_cfg.{problem}", message


def check_engines(cfg: RolloutMasterConfig) -> Problems:
    """Whether engines fill the machines."""
    tensor_parallel = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    num_workers, per_node = cfg.cluster.num_workers, cfg.cluster.workers_per_node
    kind = "GPUs" if cfg.cluster.use_gpus else "CPU workers"
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    if num_workers % tensor_parallel:
        works = near(divisors(num_workers), tensor_parallel)
        yield key, f"{tensor_parallel} does not divide the {num_workers} {kind} of the cluster; these would: {works}"
    elif tensor_parallel <= per_node and per_node % tensor_parallel:
        works = near(divisors(per_node), tensor_parallel)
        yield key, f"engines of {tensor_parallel} do not fill nodes of {per_node} {kind}; these would: {works}"
    elif tensor_parallel > per_node:
        yield (
            key,
            f"not supported yet: an engine of {tensor_parallel} spans nodes of {per_node} {kind}; use at most that",
        )


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


def check_environments(cfg: RolloutMasterConfig) -> Problems:
    for name, datasets in (("train", cfg.data.train), ("validation", cfg.data.validation or [])):
        for index, dataset in enumerate(datasets):
            if dataset.env_name not in cfg.env:
                near = nearest_key(dataset.env_name, cfg.env)
                fix = f"did you mean {near}?" if near else f"there are: {', '.join(cfg.env) or 'none'}"
                key = f"data.{name}.{index}.env_name"
                yield key, f"no section env.{dataset.env_name}; {fix}"


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
