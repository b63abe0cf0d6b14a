"""Losses and their gradients against TRL's trainers on the same batch, float32 on the CPU: docs/parity.md."""

from pathlib import Path

import pytest

from tests.parity.cases import CASES, compare, named

DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str):
    case = CASES[name]
    parity = compare(case)
    assert parity.gradient_error <= 1e-5, parity
    assert parity.loss_error <= 1e-5 or not case.is_same_value, parity


def test_the_published_table_has_these_rows():
    published = DOCS.read_text(encoding="utf-8")
    missing = [name for name, case in CASES.items() if named(name, case) not in published]
    assert not missing, f"run benchmarks/trl_parity.py and put its table into docs/parity.md; it lacks {missing}"
