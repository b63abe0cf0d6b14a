"""Metrics of a step from metadata: rollouts, success of the policy, speed.

Names have no prefix; the caller adds `train/`, `validation/` or `performance/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl.algorithms.config.metric_names import turns_reported
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, MicroBatching, PaddedTokens
from nemo_rl.models.generation.interfaces import DraftCounts, GenerationInterface
from nemo_rl.models.policy.flops import Gpu
from nemo_rl.types import BatchPlan, GroupHandle, MicroBatch, SampleMeta, SampleStatus
from nemo_rl.utils.timer import GenerationUse


def rollout_metrics(handles: Sequence[GroupHandle], *, current_weight_version: int) -> dict[str, float]:
    """Statistics of all samples of a step. `reward` is the environments' reward, before scaling and shaping.

    Means and rates are over the samples with a reward, NaN if there are none; `failed_sample_rate` is over all samples.
    `right_but_cut_rate` is the share of samples that a limit cut off and that have a reward of at least 1.
    `weight_version_lag` is the number of weight updates since the weights that sampled it. All rows of an agent's
    sample count, except for `mean_prompt_length`.
    """
    samples = [sample for handle in handles for sample in handle.samples]
    assert samples
    scored = [sample for sample in samples if sample.has_reward]
    turns = [sum(row.num_turns for row in sample.rows) for sample in scored]
    generated = [sum(row.num_generated_tokens for row in sample.rows) for sample in scored]
    lags = [current_weight_version - min(row.weight_version for row in sample.rows) for sample in scored]
    assert all(lag >= 0 for lag in lags), "a sample from weights newer than the current ones"
    env_tokens = [
        sum(row.length - row.num_prompt_tokens - row.num_generated_tokens for row in sample.rows) for sample in scored
    ]
    too_long = [any(s.status is SampleStatus.PROMPT_TOO_LONG for s in handle.samples) for handle in handles]
    num_image_tokens = sum(sample.num_sampled_image_tokens for sample in samples)
    return {
        **({"num_sampled_image_tokens": float(num_image_tokens)} if num_image_tokens else {}),
        "reward": _mean([sample.reward for sample in scored]),
        "total_turns": float(sum(turns)),
        "avg_turns_per_sample": _mean(turns),
        "max_turns_per_sample": _max(turns),
        "natural_termination_rate": _mean([sample.status is SampleStatus.COMPLETED for sample in scored]),
        "truncation_rate": _mean([sample.status is SampleStatus.TRUNCATED for sample in scored]),
        "right_but_cut_rate": _mean([s.reward >= 1.0 and s.status is SampleStatus.TRUNCATED for s in scored]),
        "repetition_loop_rate": _mean([sample.ends_in_loop for sample in scored]),
        "mean_total_tokens_per_sample": _mean([sum(row.length for row in sample.rows) for sample in scored]),
        "mean_gen_tokens_per_sample": _mean(generated),
        "max_gen_tokens_per_sample": _max(generated),
        "mean_env_tokens_per_sample": _mean(env_tokens),
        "mean_prompt_length": _mean([sample.num_prompt_tokens for sample in scored]),
        "failed_sample_rate": _mean([sample.status.is_failure for sample in samples]),
        "num_prompts_too_long": float(sum(too_long)),
        "weight_version_lag/mean": _mean(lags),
        "weight_version_lag/max": _max(lags),
    }


def turn_metrics(samples: Sequence[SampleMeta], *, max_turns: int) -> dict[str, float]:
    """Statistics of the turns of a step, and what ended them.

    max_turns_reached_rate          share that reached `max_turns` without the environment ending them
    truncated_by_turn_tokens_rate   share with a turn cut at its own limit of tokens (`max_new_tokens`)
    truncated_by_total_tokens_rate  share that ran into the limit of prompt and turns together (`max_model_len`)
    timed_out_rate                  share of all samples that ran into the time limit of episodes
    mean_gen_tokens_per_turn        sampled tokens of a turn
    turn_{n}/active_fraction        share that had an n-th turn, for the first turns of runs with more than one
    turn_{n}/reward                 mean reward that the environment gave for it
    turn_{n}/gen_tokens             mean sampled tokens of it

    The turns of an agent's sample are the turns of all its rows, row by row.
    Shares and means are over the samples with a reward unless said; NaN if there are none. `reward` and `gen_tokens` of
    a turn that no sample had are left out.
    """
    scored = [sample for sample in samples if sample.has_reward]
    truncated = [sample for sample in scored if sample.status is SampleStatus.TRUNCATED]
    by_turn_tokens = sum(not (sample.hit_turn_limit or sample.hit_total_token_limit) for sample in truncated)
    turns_of = [[turn for row in sample.rows for turn in row.turns] for sample in scored]
    num_turns, num_generated = sum(map(len, turns_of)), sum(t.num_generated_tokens for of in turns_of for t in of)
    metrics = {
        "max_turns_reached_rate": _mean([sample.hit_turn_limit for sample in scored]),
        "truncated_by_turn_tokens_rate": by_turn_tokens / len(scored) if scored else math.nan,
        "truncated_by_total_tokens_rate": _mean([sample.hit_total_token_limit for sample in scored]),
        "timed_out_rate": _mean([sample.status.is_late for sample in samples]),
        "mean_gen_tokens_per_turn": num_generated / num_turns if num_turns else math.nan,
    }
    for n in turns_reported(max_turns):
        metrics[f"turn_{n}/active_fraction"] = _mean([len(turns) >= n for turns in turns_of])
        turns = [turns[n - 1] for turns in turns_of if len(turns) >= n]
        if turns:
            metrics[f"turn_{n}/reward"] = _mean([turn.reward for turn in turns])
            metrics[f"turn_{n}/gen_tokens"] = _mean([turn.num_generated_tokens for turn in turns])
    return metrics


def agent_metrics(samples: Sequence[SampleMeta]) -> dict[str, float]:
    """How the agents of a step ended, as shares of all samples; token sequences per sample with a reward.

    agents/crashed_rate      it raised, or its process or service ended with an error
    agents/hung_rate         it had not ended when its time was over
    agents/silent_rate       it ended without a call of the model
    agents/rows_per_episode  1 for an agent that only appends to its conversation
    """
    ends = (SampleStatus.AGENT_CRASHED, SampleStatus.AGENT_HUNG, SampleStatus.AGENT_SILENT)
    rates = {f"agents/{end.removeprefix('agent_')}_rate": _mean([s.status is end for s in samples]) for end in ends}
    return rates | {"agents/rows_per_episode": _mean([len(s.rows) for s in samples if s.has_reward])}


def turn_seconds(samples: Sequence[SampleMeta]) -> dict[str, float]:
    """Mean seconds that a turn waited for its completion and for its environment; empty without turns."""
    turns = [turn for sample in samples for turn in sample.turns]
    if not turns:
        return {}
    return {
        "generation_s_per_turn": _mean([turn.generation_s for turn in turns]),
        "environment_s_per_turn": _mean([turn.env_s for turn in turns]),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` samples drawn without replacement is correct: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    assert 1 <= k <= num_samples, (k, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward of `k` samples drawn without replacement.

    The i-th smallest of n (from 1) is the largest of C(i-1, k-1) of the C(n, k) draws. For 0/1 rewards this is pass@k.
    """
    draws = math.comb(len(rewards), k)
    return sum(math.comb(i, k - 1) / draws * reward for i, reward in enumerate(sorted(rewards)))


def validation_metrics(handles: Sequence[GroupHandle], *, k_values: Sequence[int] = ()) -> dict[str, float]:
    """Validation results over the samples with a reward; NaN if there are none.

    accuracy            share of samples with a reward of at least 1
    reward              mean reward
    avg_length          mean number of generated tokens
    pass_at_{k}         mean over prompts of `pass_at_k`
    best_of_{k}         mean over prompts of `best_of_k`
    pass_k              share of prompts with a reward above 0, if there are `k_values`
    failed_sample_rate  share of all samples that failed; they do not count as wrong
    timed_out_rate      share of all samples that reached the time limit of episodes; they do not count as wrong either

    A prompt with fewer than k rewarded samples is left out of `pass_at_{k}` and `best_of_{k}`.
    """
    samples = [sample for handle in handles for sample in handle.samples]
    assert samples
    scored = [sample for sample in samples if sample.has_reward]
    metrics = {
        "accuracy": _mean([sample.reward >= 1.0 for sample in scored]),
        "reward": _mean([sample.reward for sample in scored]),
        "avg_length": _mean([sum(row.num_generated_tokens for row in sample.rows) for sample in scored]),
        "failed_sample_rate": _mean([sample.status.is_failure for sample in samples]),
        "timed_out_rate": _mean([sample.status.is_late for sample in samples]),
    }
    groups = [[sample.reward for sample in handle.samples if sample.has_reward] for handle in handles]
    for k in k_values:
        enough = [group for group in groups if len(group) >= k]
        metrics[f"pass_at_{k}"] = _mean([pass_at_k(len(g), sum(r >= 1.0 for r in g), k) for g in enough])
        metrics[f"best_of_{k}"] = _mean([best_of_k(g, k) for g in enough])
    if k_values:
        metrics["pass_k"] = _mean([max(group) > 0 for group in groups if group])
    return metrics


def performance_metrics(
    timings_s: Mapping[str, float],
    use: GenerationUse,
    *,
    num_samples: int,
    num_tokens: int,
    num_devices: int,
    num_training_devices: int,
    num_generation_devices: int,
) -> dict[str, float]:
    """Throughput of one step, and the shares of it in which training and generation were idle.

    A device is a GPU, or one worker on a CPU machine. Colocated training and generation share the `num_devices` of the
    run, and take turns: each is idle while the other works, so that the two shares add up to about 1.

    Args:
        timings_s: seconds of the step's phases and its `total_step_time`. A step without training or without logprobs
            has no rates of them.
        use: of the engines since the last step. If they were never busy, there are no rates of generation.
        num_tokens: prompts included.
    """
    step_s = timings_s["total_step_time"]
    training_s, logprobs_s = (timings_s.get(name, 0.0) for name in ("policy_training", "policy_and_reference_logprobs"))
    # The policy's workers are idle in these phases.
    exposed_s = sum(timings_s.get(name, 0.0) for name in ("generation", "exposed_generation", "wait_for_rollouts"))
    metrics = {
        "samples_per_sec": num_samples / step_s,
        "samples_per_sec_per_gpu": num_samples / step_s / num_devices,
        "tokens_per_sec": num_tokens / step_s,
        "tokens_per_sec_per_gpu": num_tokens / step_s / num_devices,
        "training_idle_fraction": exposed_s / step_s,
        "generation_idle_fraction": 1.0 - use.busy_s / use.window_s,
        "exposed_generation_s": exposed_s,
    }
    if training_s > 0:
        rate = num_tokens / (training_s + logprobs_s)
        metrics["policy_training_tokens_per_sec_per_gpu"] = num_tokens / training_s / num_training_devices
        metrics["training_worker_group_tokens_per_sec"] = rate
        metrics["training_worker_group_tokens_per_sec_per_gpu"] = rate / num_training_devices
    if use.busy_s > 0:
        rate = use.num_tokens / use.busy_s
        metrics["generation_tokens_per_sec"] = rate
        metrics["generation_tokens_per_sec_per_gpu"] = rate / num_generation_devices
    if logprobs_s > 0:
        metrics["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] = num_tokens / logprobs_s / num_training_devices
    return metrics


def flops_metrics(train_flops: float, training_s: float, num_devices: int, gpu: Gpu | None) -> dict[str, float]:
    """Operations per second of each device in training, and their share of the peak of `gpu` if it is known (MFU)."""
    rate = train_flops / training_s / num_devices
    return {"train_flops_per_gpu": rate, **({"train_fp_utilization": rate / gpu.flops} if gpu is not None else {})}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) > 0 else math.nan


def _max(values: Sequence[float]) -> float:
    return float(max(values)) if len(values) > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How well the micro-batches of a plan's optimizer steps use their budgets and the ranks' time."""

    num_micro_batches: int
    """Number for each rank, in training."""
    num_logprob_micro_batches: int
    """Number for each rank, for logprobs."""
    samples_per_micro_batch: float
    """Mean, in training."""
    fill: float
    """Tokens over the token budget, or over the padded tokens if there is no budget."""
    shared_prompt_tokens: int
    """Tokens of prompts that are not computed, because other samples of the group do."""
    forward_only_share: float
    """The share of the work of forward passes that no backward pass follows, because its samples teach nothing."""
    padding_fraction: float
    """The share of padding if these micro-batches were right-padded; sequence packing, for one, computes none."""
    token_imbalance: float
    """Tokens of the fullest rank over the mean of all ranks (1.0 is even)."""
    work_imbalance: float
    """The same for the work, squared lengths included."""
    wait_imbalance: float
    """The same for the work if ranks wait for each other at every micro-batch: the sum over micro-batches of the
    largest work among ranks, over the sum of the mean work."""

    def metrics(self) -> dict[str, float]:
        """All fields as `packing/<name>`."""
        return {f"packing/{name}": value for name, value in vars(self).items()}


def measure_packing(plan: BatchPlan, batching: Batching) -> Packing:
    """The packing of a plan that was made with `batching`."""
    ranks = [[batch for step in rank.train for batch in step] for rank in plan.ranks]
    batches = [batch for rank in ranks for batch in rank]
    tokens = sum(sample.length for batch in batches for sample in batch)
    padded = sum(_padded_tokens(batching.train, batch) for batch in batches)
    shared = sum(map(batching.saved_tokens, batches))
    room = padded if isinstance(batching.train, FixedSize) else batching.train.tokens * len(batches)
    work = np.array([[batching.cost(batch) for batch in rank] for rank in ranks])
    forward_only = [
        batching.cost(batch)
        for rank in plan.ranks
        for step, number in zip(rank.train, rank.forward_only, strict=True)
        for batch in step[:number]
    ]
    rank_tokens = [sum(sample.length for batch in rank.logprobs for sample in batch) for rank in plan.ranks]
    return Packing(
        num_micro_batches=len(ranks[0]),
        num_logprob_micro_batches=len(plan.ranks[0].logprobs),
        samples_per_micro_batch=sum(len(batch) for batch in batches) / len(batches),
        fill=(tokens - shared) / room,
        shared_prompt_tokens=shared,
        forward_only_share=sum(forward_only) / float(work.sum()),
        padding_fraction=1 - tokens / padded,
        token_imbalance=max(rank_tokens) * len(rank_tokens) / sum(rank_tokens),
        # Ranks wait for each other once in a step, or, with sharded parameters, at every micro-batch.
        work_imbalance=float(work.sum(axis=1).max() / work.sum(axis=1).mean()),
        wait_imbalance=float(work.max(axis=0).sum() / work.mean(axis=0).sum()),
    )


def _padded_tokens(rule: MicroBatching, micro_batch: MicroBatch) -> int:
    """Tokens of the micro-batch when it is right-padded."""
    num_sequences = sum(len(sample.lengths) for sample in micro_batch)
    lengths = (rule.padded_length(s) if isinstance(rule, PaddedTokens) else s.longest for s in micro_batch)
    return num_sequences * max(lengths)


EVEN = 0.1
"""Two idle fractions that differ by less are called even."""


def idle_verdict(metrics: Mapping[str, float]) -> str:
    """Which side has too little to do, by `performance_metrics`; useful if both could be busy at the same time."""
    training, generation = metrics["training_idle_fraction"], metrics["generation_idle_fraction"]
    if training > generation + EVEN:
        return f"training waits for rollouts {training:.0%}"
    if generation > training + EVEN:
        return f"generation starves: {generation:.0%} idle"
    return f"training idle {training:.0%}, generation {generation:.0%}"


class DraftMeter:
    """Counts the drafts of speculative decoding from one step to the next."""

    def __init__(self, generation: GenerationInterface) -> None:
        self.generation = generation
        self._before = generation.draft_counts()

    def metrics(self) -> dict[str, float]:
        """`draft_metrics` since the last call; a validation counts for the step after it."""
        now = self.generation.draft_counts()
        # An engine that was restarted is another worker, which counts from 0.
        steps = [counts - self._before.get(worker, DraftCounts()) for worker, counts in now.items()]
        self._before = now
        return draft_metrics(sum(steps, DraftCounts()))


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    """Number of drafts, accepted over drafted tokens, and mean tokens per draft; 0, 0 and 1 without drafts.

    A draft's tokens include the one that the policy draws in any case.
    """
    rate = counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else 0.0
    accepted = counts.num_accepted_tokens / counts.num_drafts if counts.num_drafts else 0.0
    return {
        "generation/spec_num_drafts": float(counts.num_drafts),
        "generation/spec_acceptance_rate": rate,
        "generation/spec_mean_accepted_length": 1.0 + accepted,
    }


# -- metrics by task: `<task>/<metric>`. A task is a dataset with its environment, processor and prompt files.


def by_task(
    metrics_of: Callable[[Sequence[GroupHandle]], Mapping[str, float]],
    handles: Sequence[GroupHandle],
    tasks: Sequence[str],
    names: Collection[str] | None = None,
) -> dict[str, float]:
    """For each task: the number of its samples and, if it has some, its metrics, or only those in `names`."""
    if len(tasks) < 2:  # the run's metrics are already its only task's
        return {}
    metrics: dict[str, float] = {}
    for task in tasks:
        groups = [handle for handle in handles if handle.task_name == task]
        metrics[f"{task}/num_samples"] = float(sum(len(handle.samples) for handle in groups))
        if groups:
            found = metrics_of(groups)
            metrics |= {f"{task}/{name}": found[name] for name in (found if names is None else sorted(names))}
    return metrics
