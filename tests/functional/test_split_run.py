"""GRPO with generation on its own resources, by the real command line."""

from __future__ import annotations

import pytest

from tests.functional.cli import ROOT, SMALL, comparable, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SPLIT = ROOT / "examples" / "configs" / "grpo_math_cpu_split.yaml"
SHORT = (*SMALL, "grpo.max_num_steps=3", "grpo.val_period=3", "checkpointing.enabled=false")


def test_the_shipped_configuration_learns_and_both_sides_agree(tmp_path):
    finished = run(tmp_path, config=SPLIT)
    assert finished.status == 0, finished.output[-4000:]
    assert "refit over packed_collective" in finished.output
    accuracy = [row["validation/accuracy"] for row in finished.metrics if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    steps = [row for row in finished.metrics if row["step"] > 0]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)


def test_one_and_four_generation_workers_sample_the_same_tokens(tmp_path):
    """Every metric but clocks, validation included, is the same number: so are the tokens, logprobs and weights."""
    resources = "policy.generation.colocated.resources.cpu_workers_per_node"
    one = run(tmp_path / "one", *SHORT, config=SPLIT)
    four = run(tmp_path / "four", *SHORT, "cluster.cpu_workers_per_node=5", f"{resources}=4", config=SPLIT)
    assert (one.status, four.status) == (0, 0), one.output[-3000:] + four.output[-3000:]
    assert comparable(one.metrics) == comparable(four.metrics)
    assert len(one.metrics) == 3
    colocated = run(tmp_path / "colocated", *SHORT)
    assert comparable(colocated.metrics) == comparable(one.metrics), "where it generates changes nothing either"
