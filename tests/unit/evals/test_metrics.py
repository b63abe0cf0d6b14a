"""Numbers of an evaluation against their definitions."""

import math
import statistics
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.evals.metrics import Outcome, clustered_interval, cons_at_k, summarize
from nemo_rl.types import SampleStatus


def outcome(reward: float, answer: str | None = None, status: SampleStatus = SampleStatus.COMPLETED) -> Outcome:
    return Outcome(status=status, reward=reward, answer=answer, num_tokens=5)


def majority_over_all_draws(answers: list[str | None], correct: list[float], k: int) -> float:
    """The definition: every draw of k, the most frequent answer, ties by lot."""
    value = {answer: correct[answers.index(answer)] for answer in answers if answer is not None}
    total, draws = 0.0, 0
    for drawn in combinations(answers, k):
        votes = Counter(answer for answer in drawn if answer is not None)
        winners = [answer for answer, number in votes.items() if number == max(votes.values())]
        total += sum(value[answer] for answer in winners) / len(winners) if winners else 0.0
        draws += 1
    return total / draws


@given(answers=st.lists(st.sampled_from(["1", "2", "3", "4", None]), min_size=1, max_size=8), data=st.data())
@settings(max_examples=80, deadline=None)
def test_cons_at_k_is_the_mean_over_all_draws(answers, data):
    right = data.draw(st.sampled_from(["1", "2"]))
    correct = [float(answer == right) for answer in answers]
    k = data.draw(st.integers(1, len(answers)))
    assert cons_at_k(answers, correct, k) == pytest.approx(majority_over_all_draws(answers, correct, k), abs=1e-12)


def test_the_interval_is_clustered_by_prompt():
    values = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    low, high = clustered_interval(values) or (0, 0)
    means = [statistics.mean(value) for value in values]
    margin = 1.959964 * statistics.stdev(means) / math.sqrt(4)
    assert (low + high) / 2 == pytest.approx(0.625)
    assert high - low == pytest.approx(2 * margin, rel=1e-6)
    repeated = clustered_interval([value * 10 for value in values]) or (0, 0)
    assert repeated[1] - repeated[0] == pytest.approx(high - low), "asking the same again tells nothing about prompts"
    assert clustered_interval([[1.0, 0.0]]) is None


def test_what_has_no_outcome_is_counted_apart():
    failed = outcome(0.0, status=SampleStatus.FAILED)
    too_long = outcome(0.0, status=SampleStatus.PROMPT_TOO_LONG)
    truncated = outcome(0.0, status=SampleStatus.TRUNCATED)
    prompts = [[outcome(1.0), outcome(1.0)], [truncated, failed], [too_long, too_long]]
    found = summarize(prompts, metric="pass@k", k=2)
    assert (found["num_prompts"], found["num_samples"], found["num_prompts_scored"]) == (3, 6, 1)
    assert found["score"] == 1.0 and found["pass_at"] == {"1": 0.5, "2": 1.0}
    assert found["mean"] == found["accuracy"] == pytest.approx(2 / 3)
    assert (found["truncated_rate"], found["failed_rate"]) == (pytest.approx(1 / 3), pytest.approx(1 / 6))
    assert (found["num_failed"], found["num_prompts_too_long"], found["mean_length"]) == (1, 1, 5.0)
