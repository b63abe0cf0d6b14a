"""The sliding puzzle by its real command line: a game of several turns is learned."""

import time

import pytest

from tests.functional.cli import ROOT, run

SCRIPT = ROOT / "examples" / "run_grpo_sliding_puzzle.py"
CONFIG = ROOT / "examples" / "configs" / "grpo_sliding_puzzle_cpu.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_tiny_model_learns_to_solve_2x2(tmp_path):
    """All 11 boards, sampled at temperature 1 as in training, up to eight moves."""
    started = time.monotonic()
    finished = run(tmp_path, script=SCRIPT, config=CONFIG)
    assert finished.status == 0, finished.output[-4000:]
    assert time.monotonic() - started < 300
    rows = finished.metrics
    success = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert success[0] < 0.6 and success[-1] - success[0] >= 0.3, success
    steps = [row for row in rows if row["step"] > 0]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    moves = [row["train/avg_turns_per_sample"] for row in steps]
    assert sum(moves[-5:]) < sum(moves[:5]) and max(moves) > 1, moves
    assert all(row["train/failed_sample_rate"] == 0 for row in steps)
