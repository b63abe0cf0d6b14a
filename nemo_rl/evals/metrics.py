"""Numbers of an evaluation, from the rewards and answers of n samples of each prompt, and the table that shows them.

Samples that failed have no outcome: they count in `failed_rate` only, and n is the number of the others.
"""

import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.algorithms.trainers.metrics import pass_at_k
from nemo_rl.config.terminal import visible
from nemo_rl.types import SampleStatus

SUCCESS_REWARD = 1.0
Z_95 = 1.959963984540054  # 0.975 quantile of the standard normal distribution
SCORED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclass(frozen=True)
class Outcome:
    """The values of one sample that the metrics need."""

    status: SampleStatus
    reward: float
    answer: str | None
    num_tokens: int  # generated

    @property
    def failed(self) -> bool:
        """Whether the environment or the engine failed: another try might give an outcome."""
        return self.status.is_failure or self.status.is_late


# -- one prompt


def cons_at_k(answers: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Expected correctness of the answer that most of `k` samples give, drawn without replacement from n.

    Self-consistency (Wang et al. 2022, arXiv 2203.11171, sec. 2). `answers` [n] are compared as texts; a sample without
    an answer abstains. `correct` [n] is 1 or 0; an answer counts as the mean of its samples. A tie is broken at random,
    and a vote without any answer is wrong. The expectation over all C(n, k) draws is exact: a draw in which an answer
    has m votes, t other answers have m votes too and none has more counts 1 / (t + 1).
    """
    assert 1 <= k <= len(answers), (k, len(answers))
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

    return sum(
        chance_of_winning(sizes[answer]) * statistics.fmean(given) for answer, given in values.items() if any(given)
    )


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
    """95% confidence interval of the mean of all values, with dependent values of one prompt. None for one prompt.

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
    failed = [sample.failed for sample in samples]
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
        "failed_rate": _mean_or_none(failed),
        "num_failed": sum(failed),
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
    ks = sorted({2**power for power in range(num.bit_length())} | ({num, k} if num >= k else set()))
    return {
        str(k): _mean_or_none([score_of(prompt, metric="pass@k", k=k) for prompt in scored if len(prompt) >= k])
        for k in ks
    }


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# -- the table


def show_results(results: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print a table: one line for each dataset and, if there are several, one over all prompts."""
    num = results["config"]["eval"]["num_tests_per_prompt"]
    title = visible(f"{results['model']}, {num} sample{'s' if num > 1 else ''} of each prompt")
    table = Table(title=Text(title, style="table.title"))
    headings = ("dataset", "prompts", results["metric"], "95%", "mean reward", "95%", "tokens", "truncated", "failed")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "dataset" else "right", no_wrap=True)
    rows = dict(results["datasets"])
    if len(rows) > 1:
        rows["all"] = results["overall"]
    for name, row in rows.items():
        table.add_row(
            Text(visible(name)),
            f"{row['num_prompts']:,}",
            _number(row["score"], ".4f"),
            _interval(row["score_ci95"]),
            _number(row["mean"], ".4f"),
            _interval(row["mean_ci95"]),
            _number(row["mean_length"], ",.1f"),
            _number(row["truncated_rate"], ".1%"),
            _number(row["failed_rate"], ".1%"),
        )
    out = file or sys.stdout
    Console(file=out, highlight=False, width=None if out.isatty() else 160).print(table)  # a log file folds no line


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.4f} - {bounds[1]:.4f}"
