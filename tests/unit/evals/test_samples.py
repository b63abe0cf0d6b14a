"""The folder of an evaluation that is continued, and its numbers against their definitions."""

import json
import math
import statistics
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.evals.metrics import Outcome, clustered_interval, cons_at_k, summarize
from nemo_rl.evals.samples import SampleFolder, SampleRecord, open_folder
from nemo_rl.types import SampleStatus
from nemo_rl.utils.checkpoint.manager import CheckpointError

IDENTITY = {"model": {"weights": "a"}, "eval": {"seed": 1}}


def group(prompt_id: str, num: int = 2) -> list[SampleRecord]:
    texts: Any = {"prompt": "1+1", "response": "zwei\n\u2028 \U0001f600", "answer": "2", "expected_answer": "2"}
    numbers: Any = {"reward": 1.0, "num_prompt_tokens": 3, "num_tokens": 4, "num_turns": 1, "seed": 2**62}
    same = {"dataset": "d", "prompt_id": prompt_id, "status": "completed"} | texts | numbers
    return [SampleRecord(sample_index=index, **same) for index in range(num)]


def opened(folder: Path, identity=IDENTITY) -> AbstractContextManager[SampleFolder]:
    return open_folder(folder, identity, "config", 2)


@pytest.fixture
def folder(tmp_path) -> Path:
    with opened(tmp_path / "e") as samples:
        samples.append([group("d:0"), group("d:1")])
    return tmp_path / "e"


def test_whole_groups_come_back(folder):
    with opened(folder) as samples:
        assert samples.num_bytes_dropped == 0
        assert samples.outcomes == {name: [record.outcome for record in group(name)] for name in ("d:0", "d:1")}
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_bytes().splitlines()]
    assert lines == [asdict(record) for name in ("d:0", "d:1") for record in group(name)]


@pytest.mark.parametrize("cut", [1, "line", "line and a half"])
def test_an_unfinished_end_is_cut_off(folder, cut):
    path = folder / "samples.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    keep = {"line": len(whole) - len(lines[3]), "line and a half": len(whole) - len(lines[3]) - 9}
    path.write_bytes(whole[: keep[cut] if isinstance(cut, str) else -cut])
    with opened(folder) as samples:
        assert list(samples.outcomes) == ["d:0"] and samples.num_bytes_dropped > 0
        samples.append([group("d:2")])
    with opened(folder) as samples:
        assert list(samples.outcomes) == ["d:0", "d:2"]
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_damage_in_the_middle_is_not_guessed_away(folder, line):
    """Half of a line, the line before once more, and another's."""
    path = folder / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = (b'{"torn\n', lines[0], b'{"prompt_id": "d:9"}\n')[line]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"samples.jsonl: line {line + 1} is damaged"), opened(folder):
        pass


def test_one_process_at_a_time(folder):
    with opened(folder), pytest.raises(CheckpointError, match="another process writes"), opened(folder):
        pass


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
    assert (low + high) / 2 == pytest.approx(0.625) and high - low == pytest.approx(2 * margin, rel=1e-6)
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
