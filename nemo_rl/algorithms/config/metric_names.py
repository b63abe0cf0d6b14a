"""Names of the metrics that a run reports, as far as its configuration decides them.

`checkpointing.metric_name` and `early_stopping.metric_name` may name these; another name is refused before anything
starts (`RunConfig.check_metric_names`). The names carry no `train/` or `validation/`.
"""

from collections.abc import Collection, Sequence

UPDATE = frozenset({"loss", "grad_norm", "lr", "global_valid_seqs", "global_valid_toks", "num_skipped_steps"})
"""Every optimizer step."""

PACKING = frozenset(
    {
        *("packing/fill", "packing/padding_fraction", "packing/samples_per_micro_batch"),
        *("packing/num_micro_batches", "packing/num_logprob_micro_batches", "packing/shared_prompt_tokens"),
        *("packing/forward_only_share", "packing/token_imbalance", "packing/work_imbalance", "packing/wait_imbalance"),
    }
)
"""Every plan of micro-batches."""

MOE = frozenset({"moe/load_max_over_mean", "moe/load_min_over_mean", "moe/dead_expert_fraction", "moe/router_entropy"})
"""Mixture-of-experts models only. The configuration does not know the model; `preflight` checks that."""

REPLAY = frozenset({"moe/replayed_fraction", "moe/replay_agreement"})
"""Routing replay, if it is configured."""

TRAINING = UPDATE | PACKING | MOE

ROLLOUT = frozenset(
    {
        *("reward", "num_failed_samples", "failed_sample_rate", "num_prompts_too_long"),
        "num_sampled_image_tokens",
        *("total_num_tokens", "mean_prompt_length", "mean_total_tokens_per_sample", "mean_env_tokens_per_sample"),
        *("mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_gen_tokens_per_turn"),
        *("total_turns", "avg_turns_per_sample", "max_turns_per_sample", "max_turns_reached_rate"),
        *("natural_termination_rate", "truncation_rate", "right_but_cut_rate"),
        *("timed_out_rate", "repetition_loop_rate"),
        *("truncated_by_turn_tokens_rate", "truncated_by_total_tokens_rate"),
        *("weight_version_lag/mean", "weight_version_lag/max"),
    }
)
"""Every step that samples."""

NUM_TURNS_REPORTED = 8
"""Turns, from the first, that have metrics of their own."""

TASK = frozenset(
    {"reward", "truncation_rate", "failed_sample_rate", "mean_gen_tokens_per_sample", "avg_turns_per_sample"}
)
"""Each task of a step, if a run has several."""

POLICY_GRADIENT = frozenset(
    {
        *("probs_ratio", "probs_ratio_min", "probs_ratio_max", "clip_fraction"),
        *("probs_ratio_clamped", "probs_ratio_clamped_min", "probs_ratio_clamped_max"),
        *("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"),
        "sample_mult_prob_error_max",
        *("sampling_importance_ratio", "is_oob_ratio", "kl_penalty", "approx_entropy", "num_valid_samples"),
    }
)
"""The clipped policy-gradient loss."""

LIKELIHOOD = frozenset({"positive_example_nll"})
"""The same for a loss with `positive_example_nll_weight`."""

VALUE = frozenset(
    {
        *("value_loss", "value_clip_fraction", "explained_variance", "num_valid_samples"),
        *("values_mean", "returns_mean", "returns_square_mean", "value_error_mean", "value_error_square_mean"),
    }
)
"""The value model, under `value/`, beside the names of every optimizer step."""

DISTILLATION = frozenset({"forward_kl", "reverse_kl", "num_valid_samples"})
TOP_K = frozenset({"teacher_entropy", "student_entropy", "student_topk_mass", "top1_agreement"})
"""Distillation over the teacher's largest logits."""

GROUP_ADVANTAGES = frozenset(
    {
        *("advantages/mean", "advantages/sum", "advantages/max", "advantages/min", "num_zero_variance_groups"),
        *("baseline_reward/pct_0", "baseline_reward/pct_1", "baseline_reward/pct_mixed"),
    }
)

ROWS = frozenset({"total_num_tokens", "num_left_out"})
"""Every step that learns from rows. The reasons for leaving rows out are counted where it happens."""

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
"""Speculative decoding, if it is configured."""
DRAFT = frozenset({"draft_loss", "draft_acceptance", "draft_grad_norm"})
"""A draft model that trains together with the policy."""
AGENTS = frozenset(f"agents/{name}" for name in ("crashed_rate", "hung_rate", "silent_rate", "rows_per_episode"))
"""Agents, if a dataset has them."""

LOGPROB_ERROR = frozenset({"max_seq_mult_prob_error", "num_masked_seqs_by_logprob_error"})


def turns_reported(max_turns: int) -> range:
    """The turns, from 1, with metrics of their own in a run of at most `max_turns`; none if there is one turn."""
    return range(1, min(max_turns, NUM_TURNS_REPORTED) + 1) if max_turns > 1 else range(0)


def turns(max_turns: int) -> frozenset[str]:
    """Names that every step of a run with at most `max_turns` turns reports of single turns."""
    of_each = {f"turn_{n}/active_fraction" for n in turns_reported(max_turns)}
    return frozenset(of_each | ({"turn_1/reward", "turn_1/gen_tokens"} if of_each else set()))


def of_tasks(tasks: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """`<task>/<name>` and `<task>/num_samples` of several tasks; none for one task, whose metrics are the run's."""
    if len(tasks) < 2:
        return frozenset()
    return frozenset(f"{task}/{name}" for task in tasks for name in (*names, "num_samples"))


def rollout_validation(k_values: Collection[int]) -> frozenset[str]:
    """Names that a validation by generation reports under `validation/`, with these k of pass@k and best-of-k."""
    sampled = {f"{name}_{k}" for k in k_values for name in ("pass_at", "best_of")} | ({"pass_k"} if k_values else set())
    return frozenset({"accuracy", "reward", "avg_length", "failed_sample_rate", "timed_out_rate"} | sampled)
