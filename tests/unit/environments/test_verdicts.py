"""Right answers in many forms are right, and the guide says so."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.data.rows.processors import multichoice_qa_processor
from nemo_rl.environments.code.blocks import find_program
from nemo_rl.environments.math.environment import MathEnvironment
from nemo_rl.environments.math.verification import VerificationResult
from tests.conversations import answered
from tests.unit.environments.verdicts import KINDS, TURNS, Kind, verdict
from tools import verdicts_table


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.verifier}-{kind.name}-{kind.truth}")
def test_verdicts_on_answers_of_every_form(kind: Kind) -> None:
    wrong = [(job.response, job.ground_truth, right) for job, right in kind.cases() if verdict(job)[0] is not right]
    assert not wrong


def test_programs_are_found_in_every_form() -> None:
    wrong = [turn.text for turn in TURNS if find_program(turn.text) != turn.program]
    assert not wrong
    find_program("<code>" * 5000 + "```\n" * 5000)  # in linear time, and without recursion


def test_rules_and_options_reach_the_verifier() -> None:
    row = {"question": "Which?", "options": {"A": "a", "B": "b"}, "answer": "B"}
    known = inspect.unwrap(multichoice_qa_processor)(row, 0).metadata
    answers = ["Answer: A? No, the answer is B", "Answer: B. The answer: E"]
    for published_rules, rewards in ((False, [1.0, 1.0]), (True, [0.0, 1.0])):
        section = {"verifier_type": "english_multichoice", "published_rules": published_rules, "num_workers": 1}
        environment: Any = MathEnvironment(section)
        environment.pool = SimpleNamespace(run=lambda jobs: [VerificationResult(*verdict(job)) for job in jobs])
        returned = environment.step(list(map(answered, answers)), [known, known])
        assert returned.rewards.tolist() == rewards, published_rules


def test_the_guide_has_these_tables() -> None:
    for path, text in verdicts_table.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/verdicts_table.py"
