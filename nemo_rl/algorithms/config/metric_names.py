"""Names of the metrics that a run reports, as far as its configuration decides them.

`checkpointing.metric_name` and `early_stopping.metric_name` may name these; another name is refused before anything
starts. The names carry no `train/` or `validation/`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from nemo_rl.config.errors import nearest_key

if TYPE_CHECKING:
    from nemo_rl.algorithms.config.distillation import DistillationConfig
    from nemo_rl.algorithms.config.grpo import GRPOConfig
    from nemo_rl.algorithms.config.loop import LoopConfig
    from nemo_rl.algorithms.config.rollout import RolloutConfig
    from nemo_rl.utils.config import CheckpointingConfig

UPDATE = frozenset({"loss", "grad_norm", "lr", "global_valid_seqs", "global_valid_toks", "num_skipped_steps"})
"""Of every optimizer step."""

PACKING = frozenset(
    {
        "packing/fill",
        "packing/num_logprob_micro_batches",
        "packing/num_micro_batches",
        "packing/padding_fraction",
        "packing/samples_per_micro_batch",
        "packing/token_imbalance",
        "packing/wait_imbalance",
        "packing/work_imbalance",
    }
)
"""Of every plan."""

MOE = frozenset({"moe/load_max_over_mean", "moe/load_min_over_mean", "moe/dead_expert_fraction", "moe/router_entropy"})
"""Of models with experts only, which the configuration does not know: `preflight` does."""

REPLAY = frozenset({"moe/replayed_fraction", "moe/replay_agreement"})
"""Of routing replay, where it is configured."""

TRAINING = UPDATE | PACKING | MOE

ROLLOUT = frozenset(
    {
        "reward",
        "mean_prompt_length",
        "total_num_tokens",
        "num_failed_samples",
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
        "weight_version_lag/mean",
        "weight_version_lag/max",
        "max_turns_reached_rate",
        "truncated_by_turn_tokens_rate",
        "truncated_by_total_tokens_rate",
        "timed_out_rate",
        "mean_gen_tokens_per_turn",
    }
)
"""Of every step that samples."""

NUM_TURNS_REPORTED = 8
"""Turns, from the first, that have metrics of their own."""

TASK = frozenset(
    {"reward", "truncation_rate", "failed_sample_rate", "mean_gen_tokens_per_sample", "avg_turns_per_sample"}
)
"""Of each task of a step, where a run has several."""

POLICY_GRADIENT = frozenset(
    {
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
"""Of the clipped policy-gradient loss."""

VALUE = frozenset(
    {
        "value_loss",
        "num_valid_samples",
        "value_clip_fraction",
        "values_mean",
        "returns_mean",
        "returns_square_mean",
        "value_error_mean",
        "value_error_square_mean",
        "explained_variance",
    }
)
"""Of the value model, under `value/`, beside those of every optimizer step."""

DISTILLATION = frozenset({"forward_kl", "reverse_kl", "num_valid_samples"})
TOP_K = frozenset({"teacher_entropy", "student_entropy", "student_topk_mass", "top1_agreement"})
"""Of distillation over the teacher's largest logits."""

GROUP_ADVANTAGES = frozenset(
    {
        "advantages/mean",
        "advantages/sum",
        "advantages/max",
        "advantages/min",
        "baseline_reward/pct_0",
        "baseline_reward/pct_1",
        "baseline_reward/pct_mixed",
        "num_zero_variance_groups",
    }
)

ROWS = frozenset({"total_num_tokens", "num_left_out"})
"""Of every step that learns from rows. What rows are left out for is counted where it happens."""

NLL = frozenset({"token_probability", "num_unmasked_tokens", "num_valid_samples"})
PAIRS = frozenset(
    {"accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean", "num_valid_samples"}
)
DPO = PAIRS | {"preference_loss", "sft_loss", "logprobs_chosen_mean", "logprobs_rejected_mean"}
REWARD_MODEL = PAIRS

DYNAMIC_SAMPLING = frozenset(
    {
        "filtered_reward",
        "dynamic_sampling_num_gen_batches",
        "dynamic_sampling_num_zero_variance_groups",
        "dynamic_sampling_num_discarded_valid_samples",
    }
)
SPECULATION = frozenset(f"generation/spec_{name}" for name in ("num_drafts", "acceptance_rate", "mean_accepted_length"))
"""Of speculative decoding, where it is configured."""
LOGPROB_ERROR = frozenset({"max_seq_mult_prob_error", "num_masked_seqs_by_logprob_error"})


def grpo(cfg: GRPOConfig) -> frozenset[str]:
    """What every GRPO step reports under `train/`."""
    names = TRAINING | ROLLOUT | turns(cfg) | POLICY_GRADIENT | GROUP_ADVANTAGES
    if cfg.use_dynamic_sampling:
        names |= DYNAMIC_SAMPLING
    if cfg.seq_logprob_error_threshold is not None:
        names |= LOGPROB_ERROR
    if cfg.async_grpo.enabled:
        names |= {"buffer_size"}
    return names


def turns_reported(max_turns: int) -> range:
    """The turns, from 1, with metrics of their own in a run of at most `max_turns`; none where one turn is all."""
    return range(1, min(max_turns, NUM_TURNS_REPORTED) + 1) if max_turns > 1 else range(0)


def turns(cfg: RolloutConfig) -> frozenset[str]:
    """What every step reports of single turns."""
    of_each = {f"turn_{n}/active_fraction" for n in turns_reported(cfg.max_rollout_turns)}
    return frozenset(of_each | ({"turn_1/reward", "turn_1/gen_tokens"} if of_each else set()))


def ppo(cfg: RolloutConfig) -> frozenset[str]:
    """What every PPO step reports under `train/`."""
    return TRAINING | ROLLOUT | turns(cfg) | POLICY_GRADIENT | {f"value/{name}" for name in UPDATE | MOE | VALUE}


def distillation(cfg: DistillationConfig) -> frozenset[str]:
    """What every step of distillation reports under `train/`."""
    return TRAINING | ROLLOUT | turns(cfg) | DISTILLATION | (TOP_K if cfg.topk_logits_k is not None else frozenset())


def of_tasks(tasks: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """`<task>/<name>` and `<task>/num_samples` of each of several tasks; nothing of a single one.

    Of one task, the metrics of the run speak already.
    """
    if len(tasks) < 2:
        return frozenset()
    return frozenset(f"{task}/{name}" for task in tasks for name in (*names, "num_samples"))


def rollout_validation(cfg: RolloutConfig) -> frozenset[str]:
    """What a validation by generation reports under `validation/`."""
    sampled = {f"{name}_{k}" for k in cfg.val_k_values for name in ("pass_at", "best_of")}
    return frozenset({"accuracy", "reward", "avg_length", "failed_sample_rate", "timed_out_rate"} | sampled)


class Sections(Protocol):
    """A master configuration; `section` is the name of the algorithm's own section."""

    section: ClassVar[str]


class MetricNames(Sections, Protocol):
    """A master configuration as far as metrics go."""

    @property
    def checkpointing(self) -> CheckpointingConfig: ...
    @property
    def train_metrics(self) -> frozenset[str]: ...
    @property
    def val_metrics(self) -> frozenset[str]: ...


def check_metric_names(
    cfg: MetricNames, loop: LoopConfig, free_prefixes: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """(key, message) for metrics that no run with this configuration produces, or not when they are needed.

    `free_prefixes` are first parts of names (before a slash) about which nothing is known before the run.
    """
    stopping = loop.early_stopping.metric_name
    if stopping is not None:
        yield from _check_name(f"{cfg.section}.early_stopping.metric_name", stopping, cfg, loop, free_prefixes)
    checkpointing = cfg.checkpointing
    if not checkpointing.enabled or checkpointing.metric_name is None:
        return
    name = checkpointing.metric_name
    problems = list(_check_name("checkpointing.metric_name", name, cfg, loop, free_prefixes))
    yield from problems
    save_period = checkpointing.save_period
    if not problems and name.startswith("val:") and save_period % loop.val_period and checkpointing.keep_top_k:
        works = near(divisors(save_period), loop.val_period)
        yield (
            "checkpointing.save_period",
            f"{save_period} is no multiple of {cfg.section}.val_period={loop.val_period}: checkpoints between "
            f"validations have no {name.partition(':')[2]} to be ranked by; for val_period use {works}",
        )


def _check_name(
    key: str, name: str, cfg: MetricNames, loop: LoopConfig, free_prefixes: Collection[str]
) -> Iterator[tuple[str, str]]:
    prefix, _, metric = name.partition(":")
    if prefix == "val" and loop.val_period == 0:
        yield key, f"{name} needs validation; set {cfg.section}.val_period above 0, or {key.rpartition('.')[2]}=null"
        return
    available = cfg.val_metrics if prefix == "val" else cfg.train_metrics
    if metric in available or metric.partition("/")[0] in free_prefixes:
        return
    more = ""
    if prefix == "val" and re.fullmatch(r"(pass_at|best_of)_\d+|pass@\w+", metric):
        more = f" ({cfg.section}.val_num_generations_per_prompt decides on pass_at_k)"
    nearest = nearest_key(metric, sorted(available))
    fix = f"did you mean {prefix}:{nearest}?" if nearest else f"there are: {', '.join(sorted(available))}"
    yield key, f"no run with this configuration produces {name}{more}; {fix}"


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def near(values: list[int], wanted: int) -> str:
    """At most six of the increasing `values`, those nearest to `wanted`."""
    nearest = sorted(sorted(values, key=lambda value: abs(value - wanted))[:6])
    return ", ".join(str(value) for value in nearest)
