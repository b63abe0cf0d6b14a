"""Whole runs of the real command line with the model cut in every direction: they learn, agree and change layout."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl.data.tiny_model import RECIPES, ensure_tiny_model
from tests.functional.cli import SMALL, Finished, run

pytestmark = pytest.mark.timeout(600)

TWO_RANKS = "cluster.cpu_workers_per_node=2"
PACKED = "policy.sequence_packing={enabled: true, train_mb_tokens: 128, logprob_mb_tokens: 256}"
TENSOR = ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.sequence_parallel=true")
EXPERTS = "policy.dtensor_cfg.expert_parallel_size=2"
LORA = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 16, alpha: 32}"


def steps_of(finished: Finished) -> list[dict[str, Any]]:
    assert finished.status == 0, finished.output[-4000:]
    return [row for row in finished.metrics if row["step"] > 0]


def assert_learned(finished: Finished) -> None:
    steps = steps_of(finished)
    accuracy = [row["validation/accuracy"] for row in finished.metrics if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    rewards = [row["train/reward"] for row in steps]
    fifth = len(rewards) // 5
    assert sum(rewards[-fifth:]) > sum(rewards[:fifth]) + 0.1 * fifth, rewards
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path):
    """A mixture of experts, packed: tensor and sequence parallel at first, then with its experts spread over ranks."""
    model = ensure_tiny_model(tmp_path / "moe", replace(RECIPES["arithmetic-moe"], num_clean_steps=60))
    common = (*SMALL, TWO_RANKS, PACKED, f"policy.model_name={model}")
    rows = steps_of(run(tmp_path, *common, *TENSOR, "grpo.max_num_steps=2"))
    spread = run(tmp_path, *common, EXPERTS, "grpo.max_num_steps=3")
    rows += steps_of(spread)
    assert "step_2 after step 2" in spread.output
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/token_mult_prob_error"] <= 1.0001
        assert 0 < row["train/packing/fill"] <= 1 <= row["train/packing/num_micro_batches"]
        assert row["train/moe/load_max_over_mean"] >= 1 >= row["train/moe/load_min_over_mean"]
        assert 0 < row["train/moe/router_entropy"] < 1.39  # log 4
        assert row["performance/train_flops_per_gpu"] > 0
    assert any(row["train/grad_norm"] > 0 for row in rows[:2])


@pytest.mark.slow
def test_adapters_learn(tmp_path):
    """Merged into the weights that generation receives. A killed run with adapters is one of DPO."""
    assert_learned(run(tmp_path, LORA, "policy.optimizer.kwargs.lr=2e-3", "grpo.max_num_steps=20"))
