"""Asynchronous GRPO by the real command line: it learns from weights that arrive in flight."""

from pathlib import Path

import pytest

from tests.functional.cli import run

pytestmark = pytest.mark.timeout(600)

SPLIT = (
    "cluster.cpu_workers_per_node=2",
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.enabled=true",
)
IN_FLIGHT = (
    "grpo.async_grpo.in_flight_weight_updates=true",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "grpo.async_grpo.group_order=arrival",
)


@pytest.mark.slow
def test_weights_arrive_in_flight_and_it_learns(tmp_path: Path):
    again = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
    finished = run(tmp_path, *SPLIT, *IN_FLIGHT, again, "policy.train_micro_batch_size=256")
    assert finished.status == 0, finished.output[-4000:]
    rows = finished.metrics
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    lags = [row["train/weight_version_lag/max"] for row in rows if row["step"] > 0]
    assert max(lags) <= 2 and max(lags[4:]) > 0
    assert all(row["performance/controller_token_bytes"] == 0 for row in rows if row["step"] > 0)
