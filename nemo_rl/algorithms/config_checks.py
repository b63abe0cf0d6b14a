"""Combinations of sections that cannot work in a GRPO run, found before anything starts.

Each check yields (dotted key, message); the message says which values would work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl.algorithms.rollout_batch import check_batching
from nemo_rl.config.errors import nearest_key
from nemo_rl.models.policy.parallel_sizes import ParallelSizes, layout_problems

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import GRPOMasterConfig

Problems = Iterator[tuple[str, str]]

TRAIN_METRICS = frozenset(
    {
        "loss",
        "grad_norm",
        "lr",
        "reward",
        "mean_prompt_length",
        "global_valid_seqs",
        "global_valid_toks",
        "advantages/mean",
        "advantages/sum",
        "total_num_tokens",
        "num_failed_samples",
        "advantages/max",
        "advantages/min",
        "baseline_reward/pct_0",
        "baseline_reward/pct_1",
        "baseline_reward/pct_mixed",
        "num_zero_variance_groups",
        "total_turns",
        "avg_turns_per_sample",
        "max_turns_per_sample",
        "natural_termination_rate",
        "truncation_rate",
        "mean_total_tokens_per_sample",
        "mean_gen_tokens_per_sample",
        "max_gen_tokens_per_sample",
        "mean_env_tokens_per_sample",
        "failed_sample_rate",
        "num_prompts_too_long",
        "num_skipped_steps",
        "packing/fill",
        "packing/num_logprob_micro_batches",
        "packing/num_micro_batches",
        "packing/padding_fraction",
        "packing/samples_per_micro_batch",
        "packing/token_imbalance",
        "packing/wait_imbalance",
        "packing/work_imbalance",
        "weight_version_lag/mean",
        "weight_version_lag/max",
        "probs_ratio",
        "probs_ratio_clamped",
        "probs_ratio_min",
        "probs_ratio_max",
        "probs_ratio_clamped_min",
        "probs_ratio_clamped_max",
        "clip_fraction",
        "kl_penalty",
        "token_mult_prob_error",
        "gen_kl_error",
        "policy_kl_error",
        "js_divergence_error",
        "sampling_importance_ratio",
        "num_valid_samples",
        "approx_entropy",
        "is_oob_ratio",
    }
)
"""What every GRPO step reports under `train/`, and `checkpointing.metric_name: train:<name>` may name."""

DYNAMIC_SAMPLING_METRICS = frozenset(
    {
        "filtered_reward",
        "dynamic_sampling_num_gen_batches",
        "dynamic_sampling_num_zero_variance_groups",
        "dynamic_sampling_num_discarded_valid_samples",
    }
)
MOE_METRICS = frozenset(
    {"moe/load_max_over_mean", "moe/load_min_over_mean", "moe/dead_expert_fraction", "moe/router_entropy"}
)
"""Of models with experts only, which the configuration does not know: `preflight` does."""
LOGPROB_ERROR_METRICS = frozenset({"max_seq_mult_prob_error", "num_masked_seqs_by_logprob_error"})


def check_run(cfg: GRPOMasterConfig) -> Problems:
    yield from check_batch_sizes(cfg)
    yield from check_layout(cfg)
    yield from check_lengths(cfg)
    yield from check_loss(cfg)
    yield from check_environments(cfg)
    yield from check_validation(cfg)


def check_batch_sizes(cfg: GRPOMasterConfig) -> Problems:
    samples, global_batch = cfg.grpo.num_samples_per_step, cfg.policy.train_global_batch_size
    if samples % global_batch:
        yield (
            "policy.train_global_batch_size",
            f"{global_batch} does not divide the {samples} samples of a step (grpo.num_prompts_per_step="
            f"{cfg.grpo.num_prompts_per_step} x num_generations_per_prompt={cfg.grpo.num_generations_per_prompt}); "
            f"these would: {_near(_divisors(samples), global_batch)}",
        )
    if list(layout_problems(cfg.policy.dtensor_cfg, cfg.cluster.num_workers)):
        return
    num_ranks = ParallelSizes.of(cfg.policy.dtensor_cfg, cfg.cluster.num_workers).data_parallel
    if global_batch % num_ranks:
        multiples = [size for size in _divisors(samples) if size % num_ranks == 0]
        fix = f"these would: {_near(multiples, global_batch)}"
        if not multiples:
            prompts = cfg.grpo.num_prompts_per_step
            fix = f"make it and grpo.num_prompts_per_step (now {prompts}) multiples of {num_ranks}"
        yield (
            "policy.train_global_batch_size",
            f"{global_batch} cannot be shared by {num_ranks} training ranks; {fix}",
        )
        return
    for key, message in check_batching(
        cfg.policy, num_ranks=num_ranks, micro_batch_multiple=cfg.policy.dtensor_cfg.micro_batch_multiple
    ):
        yield f"policy.{key}", message


def check_layout(cfg: GRPOMasterConfig) -> Problems:
    if cfg.policy.sequence_packing.enabled and cfg.policy.padding_free is False:
        yield (
            "policy.padding_free",
            "packed sequences lie end to end; set it to null, or policy.sequence_packing.enabled=false and "
            "policy.dynamic_batching.enabled=true",
        )
    for policy_key, message in layout_problems(cfg.policy.dtensor_cfg, cfg.cluster.num_workers):
        yield f"policy.dtensor_cfg.{policy_key}", message
    tensor_parallel = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    num_workers, per_node = cfg.cluster.num_workers, cfg.cluster.workers_per_node
    kind = "GPUs" if cfg.cluster.use_gpus else "CPU workers"
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    if num_workers % tensor_parallel:
        works = _near(_divisors(num_workers), tensor_parallel)
        yield key, f"{tensor_parallel} does not divide the {num_workers} {kind} of the cluster; these would: {works}"
    elif tensor_parallel <= per_node and per_node % tensor_parallel:
        works = _near(_divisors(per_node), tensor_parallel)
        yield key, f"engines of {tensor_parallel} do not fill nodes of {per_node} {kind}; these would: {works}"
    elif tensor_parallel > per_node:
        yield (
            key,
            f"not supported yet: an engine of {tensor_parallel} spans nodes of {per_node} {kind}; use at most that",
        )


def check_lengths(cfg: GRPOMasterConfig) -> Problems:
    longest_prompt, longest = cfg.data.max_input_seq_length, cfg.policy.generation.vllm_cfg.max_model_len
    if longest_prompt > longest:
        yield (
            "data.max_input_seq_length",
            f"{longest_prompt} is more than policy.generation.vllm_cfg.max_model_len={longest}: such prompts could "
            f"never be answered; use at most that",
        )


def check_loss(cfg: GRPOMasterConfig) -> Problems:
    loss, grpo = cfg.loss_fn, cfg.grpo
    generation = cfg.policy.generation
    if loss.reference_policy_kl_penalty != 0 and (generation.top_p < 1 or generation.top_k is not None):
        yield (
            "loss_fn.reference_policy_kl_penalty",
            "not supported yet: a KL penalty with policy.generation.top_p or top_k, which filter the policy and not "
            "the reference; set it to 0, or top_p=1 and top_k=null",
        )
    if cfg.policy.deterministic and cfg.cluster.use_gpus and generation.top_p < 1:
        yield (
            "policy.deterministic",
            "cannot be had with policy.generation.top_p on GPUs, whose cumulative sums come in any order; set top_p=1 "
            "or deterministic=false",
        )
    num_updates = grpo.num_samples_per_step / cfg.policy.train_global_batch_size
    if loss.force_on_policy_ratio and num_updates != 1:
        yield (
            "loss_fn.force_on_policy_ratio",
            f"needs exactly one optimizer step per RL step; set policy.train_global_batch_size="
            f"{grpo.num_samples_per_step} (num_prompts_per_step x num_generations_per_prompt)",
        )
    if grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            "grpo.skip_reference_policy_logprobs_calculation",
            f"the KL penalty needs them; set loss_fn.reference_policy_kl_penalty=0 "
            f"(it is {loss.reference_policy_kl_penalty})",
        )
    if loss.use_kl_in_reward and grpo.adv_estimator.name != "reinforce_plus_plus":
        yield "loss_fn.use_kl_in_reward", "only grpo.adv_estimator.name=reinforce_plus_plus has the KL in the reward"
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        yield "loss_fn.use_kl_in_reward", "has no effect without loss_fn.reference_policy_kl_penalty above 0"
    if cfg.policy.generation.temperature == 0:
        yield "policy.generation.temperature", "training needs a temperature above 0; only val_temperature may be 0"


def check_environments(cfg: GRPOMasterConfig) -> Problems:
    for name, datasets in (("train", cfg.data.train), ("validation", cfg.data.validation or [])):
        for index, dataset in enumerate(datasets):
            if dataset.env_name not in cfg.env:
                near = nearest_key(dataset.env_name, cfg.env)
                fix = f"did you mean {near}?" if near else f"there are: {', '.join(cfg.env) or 'none'}"
                key = f"data.{name}.{index}.env_name"
                yield key, f"no section env.{dataset.env_name}; {fix}"


def check_validation(cfg: GRPOMasterConfig) -> Problems:
    grpo = cfg.grpo
    if grpo.validates and not cfg.data.has_validation:
        yield (
            "data.validation",
            f"nothing to validate on (grpo.val_period={grpo.val_period}, val_at_start={_yaml(grpo.val_at_start)}, "
            f"val_at_end={_yaml(grpo.val_at_end)}); name a dataset, set split_validation_size of a training dataset, "
            f"or switch validation off with grpo.val_period=0",
        )
    if not cfg.checkpointing.enabled or cfg.checkpointing.metric_name is None:
        return
    prefix, _, metric = cfg.checkpointing.metric_name.partition(":")
    key = "checkpointing.metric_name"
    if prefix == "val" and grpo.val_period == 0:
        yield key, f"{prefix}:{metric} needs validation; set grpo.val_period above 0, or metric_name=null"
        return
    save_period = cfg.checkpointing.save_period
    if prefix == "val" and save_period % grpo.val_period and cfg.checkpointing.keep_top_k is not None:
        yield (
            "checkpointing.save_period",
            f"{save_period} is no multiple of grpo.val_period={grpo.val_period}: checkpoints between validations have "
            f"no {metric} to be ranked by; for val_period use {_near(_divisors(save_period), grpo.val_period)}",
        )
    available = validation_metric_names(cfg) if prefix == "val" else train_metric_names(cfg)
    # What an environment reports of itself is not known before it runs.
    if metric not in available and metric.partition("/")[0] not in cfg.env:
        more = ""
        if prefix == "val" and re.fullmatch(r"(pass_at|best_of)_\d+|pass@\w+", metric):
            more = f" (grpo.val_num_generations_per_prompt={grpo.val_num_generations_per_prompt} decides on pass_at_k)"
        near = nearest_key(metric, available)
        fix = f"did you mean {prefix}:{near}?" if near else f"there are: {', '.join(sorted(available))}"
        yield key, f"no run with this configuration produces {prefix}:{metric}{more}; {fix}"


def validation_metric_names(cfg: GRPOMasterConfig) -> list[str]:
    sampled = [f"{name}_{k}" for k in cfg.grpo.val_k_values for name in ("pass_at", "best_of")]
    return ["accuracy", "reward", "avg_length", "failed_sample_rate", *sampled]


def train_metric_names(cfg: GRPOMasterConfig) -> list[str]:
    names = set(TRAIN_METRICS) | MOE_METRICS
    if cfg.grpo.use_dynamic_sampling:
        names |= DYNAMIC_SAMPLING_METRICS
    if cfg.grpo.seq_logprob_error_threshold is not None:
        names |= LOGPROB_ERROR_METRICS
    return sorted(names)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _near(values: list[int], wanted: int) -> str:
    """At most six of the increasing `values`, those nearest to `wanted`."""
    nearest = sorted(sorted(values, key=lambda value: abs(value - wanted))[:6])
    return ", ".join(str(value) for value in nearest)


def _yaml(value: bool) -> str:
    return "true" if value else "false"
