"""Numbers of an evaluation, from the rewards and answers of n samples of each prompt. Pure functions.

Samples that failed have no outcome: they count in `failed_rate` alone, and n is what is left.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nemo_rl.algorithms.trainers.metrics import pass_at_k
from nemo_rl.types import SampleStatus

SUCCESS_REWARD = 1.0
Z_95 = 1.959963984540054  # 0.975 quantile of the standard normal distribution
SCORED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What counts of one sample."""

    status: SampleStatus
    reward: float
    answer: str | None
    num_tokens: int  # generated


# -- one prompt


def cons_at_k(answers: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Expected correctness of the answer that most of `k` samples give, drawn without replacement from n.

    Self-consistency (Wang et al. 2022, arXiv 2203.11171, sec. 2). `answers` [n] are compared as texts; a sample without
    one abstains. `correct` [n] is 1 or 0; an answer counts as the mean of its samples. A tie is drawn by lot, a vote
    without any answer is wrong. The expectation over all C(n, k) draws is exact: of the draws in which an answer has m
    votes and no other more, those with t others at m count 1 / (t + 1).

    Raises:
        ValueError: when there are fewer than `k` samples.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"k={k} needs at least k samples per prompt, and there are {len(answers)}.")
    values: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, correct, strict=True):
        if answer is not None:
            values[answer].append(value)
    sizes = Counter({answer: len(given) for answer, given in values.items()})
    num_abstaining = len(answers) - sizes.total()

    @cache
    def chance_of_winning(size: int) -> float:
        others = list(sizes.values())
        others.remove(size)
        return _weight_of_wins(size, others, num_abstaining, k) / math.comb(len(answers), k)

    return sum(chance_of_winning(sizes[answer]) * _mean(given) for answer, given in values.items() if any(given))


def _weight_of_wins(size: int, others: list[int], num_abstaining: int, k: int) -> float:
    """How many draws of `k` a group of `size` equal answers wins, ties by their share."""
    weight = 0.0
    for votes in range(1, min(size, k) + 1):
        own = math.comb(size, votes)
        ways = {(0, 0): 1}  # (drawn from others, others at `votes`) -> number of draws
        for other in others:
            grown: dict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), number in ways.items():
                for taken in range(min(other, votes, k - votes - drawn) + 1):
                    grown[drawn + taken, tied + (taken == votes)] += number * math.comb(other, taken)
            ways = grown
        for (drawn, tied), number in ways.items():
            rest = k - votes - drawn
            weight += own * number * math.comb(num_abstaining, rest) / (tied + 1)
    return weight


# -- many prompts


def clustered_interval(values: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95% confidence interval of the mean of all values, those of one prompt being dependent; None for one prompt.

    mean -+ 1.96 SE with SE^2 = C / (C - 1) * sum_c (sum_i (x_ci - mean))^2 / N^2 over the C prompts and N values: the
    cluster-robust standard error (Miller 2024, arXiv 2411.00640, sec. 2.2), with the small-sample factor of the number
    of clusters. With the same number of values each, SE is the standard deviation of the prompts' means over sqrt(C).
    It is an approximation for many prompts; when all values are equal it has no width.
    """
    if len(values) < 2:
        return None
    num = sum(len(cluster) for cluster in values)
    mean = math.fsum(x for cluster in values for x in cluster) / num
    squares = math.fsum(math.fsum(x - mean for x in cluster) ** 2 for cluster in values)
    margin = Z_95 * math.sqrt(len(values) / (len(values) - 1) * squares) / num
    return mean - margin, mean + margin


def summarize(prompts: Sequence[Sequence[Outcome]], *, metric: str, k: int) -> dict[str, Any]:
    """Results over prompts, JSON-able. A value that no sample decides is None.

    num_prompts, num_samples       all of them
    score, score_ci95              mean over prompts of pass@k or cons@k
    num_prompts_scored             prompts with at least k samples that have an outcome: those in `score`
    pass_at                        {k: mean over prompts}, for powers of two, n and the k asked for
    mean, mean_ci95                mean reward of all samples, the interval clustered by prompt
    accuracy                       share of samples with the full reward
    mean_length, max_length        generated tokens
    truncated_rate                 of the samples that have an outcome
    failed_rate, num_failed        of all samples; failed samples are not counted as wrong
    num_prompts_too_long           prompts that leave no room for an answer: not counted as wrong either
    """
    samples = [sample for prompt in prompts for sample in prompt]
    scored = [[sample for sample in prompt if sample.status in SCORED] for prompt in prompts]
    with_outcome = [prompt for prompt in scored if prompt]
    flat = [sample for prompt in with_outcome for sample in prompt]
    num_failed = sum(sample.status is SampleStatus.FAILED for sample in samples)
    values = [score_of(prompt, metric=metric, k=k) for prompt in scored if len(prompt) >= k]
    rewards = [[sample.reward for sample in prompt] for prompt in with_outcome]
    return {
        "num_prompts": len(prompts),
        "num_samples": len(samples),
        "score": _mean_or_none(values),
        "score_ci95": clustered_interval([[value] for value in values]),
        "num_prompts_scored": len(values),
        "pass_at": _pass_at(scored, k),
        "mean": _mean_or_none([reward for prompt in rewards for reward in prompt]),
        "mean_ci95": clustered_interval(rewards),
        "accuracy": _mean_or_none([sample.reward >= SUCCESS_REWARD for sample in flat]),
        "mean_length": _mean_or_none([sample.num_tokens for sample in flat]),
        "max_length": max((sample.num_tokens for sample in flat), default=None),
        "truncated_rate": _mean_or_none([sample.status is SampleStatus.TRUNCATED for sample in flat]),
        "failed_rate": _mean_or_none([sample.status is SampleStatus.FAILED for sample in samples]),
        "num_failed": num_failed,
        "num_prompts_too_long": sum(
            any(sample.status is SampleStatus.PROMPT_TOO_LONG for sample in prompt) for prompt in prompts
        ),
    }


def score_of(samples: Sequence[Outcome], *, metric: str, k: int) -> float:
    """pass@k or cons@k of one prompt, from samples that have an outcome."""
    correct = [float(sample.reward >= SUCCESS_REWARD) for sample in samples]
    if metric == "cons@k":
        return cons_at_k([sample.answer for sample in samples], correct, k)
    return pass_at_k(len(samples), int(sum(correct)), k)


def _pass_at(scored: Sequence[Sequence[Outcome]], k: int) -> dict[str, float | None]:
    num = max((len(prompt) for prompt in scored), default=0)
    ks = sorted({2**power for power in range(num.bit_length()) if 2**power <= num} | ({num, k} if num >= k else set()))
    return {
        str(k): _mean_or_none([score_of(prompt, metric="pass@k", k=k) for prompt in scored if len(prompt) >= k])
        for k in ks
    }


def by_dataset(
    prompts: Mapping[str, Sequence[Sequence[Outcome]]], *, metric: str, k: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Over all prompts of all datasets, each prompt counting the same, and by dataset."""
    everything = [prompt for group in prompts.values() for prompt in group]
    each = {name: summarize(group, metric=metric, k=k) for name, group in prompts.items()}
    return summarize(everything, metric=metric, k=k), each


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None
