"""GRPO with generation on its own resources, by the real command line."""

import pytest

from tests.functional.cli import ROOT, SMALL, comparable, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SPLIT = ROOT / "examples" / "configs" / "grpo_math_cpu_split.yaml"
SHORT = (*SMALL, "grpo.max_num_steps=3", "grpo.val_period=3", "checkpointing.enabled=false")


def test_one_and_four_generation_workers_sample_the_same_tokens(tmp_path):
    """Every metric but clocks, validation included, is the same number: so are the tokens, logprobs and weights."""
    resources = "policy.generation.colocated.resources.cpu_workers_per_node"
    one = run(tmp_path / "one", *SHORT, config=SPLIT)
    four = run(tmp_path / "four", *SHORT, "cluster.cpu_workers_per_node=5", f"{resources}=4", config=SPLIT)
    assert (one.status, four.status) == (0, 0), one.output[-3000:] + four.output[-3000:]
    assert "refit over packed_collective" in one.output
    assert comparable(one.metrics) == comparable(four.metrics)
    assert len(one.metrics) == 3
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in one.metrics)
    assert all(row["performance/controller_token_bytes"] == 0 for row in one.metrics)
    colocated = run(tmp_path / "colocated", *SHORT)
    assert comparable(colocated.metrics) == comparable(one.metrics), "where it generates changes nothing either"
