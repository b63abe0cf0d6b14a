"""Asynchronous GRPO by the real command line: it learns, its weights arrive in flight, and a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional.cli import CPU_CONFIG, SCRIPT, SMALL, resumes_bit_for_bit, run

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
def test_a_run_killed_at_any_moment_continues_bit_for_bit(tmp_path):
    overrides = (*SMALL, *SPLIT, "checkpointing.save_consolidated=true")
    resumes_bit_for_bit(tmp_path, SCRIPT, CPU_CONFIG, overrides, "policy", at_once=True)
    open_groups = tmp_path / "whole" / "results" / "grpo_cpu" / "step_2" / "replay_buffer" / "open_groups.json"
    assert {record["version"] for record in json.loads(open_groups.read_text())} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_weights_arrive_in_flight_and_it_learns(tmp_path: Path, recompute: str):
    again = f"grpo.async_grpo.recompute_kv_cache_after_weight_updates={recompute}"
    finished = run(tmp_path, *SPLIT, *IN_FLIGHT, again, "policy.train_micro_batch_size=256")
    assert finished.status == 0, finished.output[-4000:]
    rows = finished.metrics
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    lags = [row["train/weight_version_lag/max"] for row in rows if row["step"] > 0]
    assert max(lags) <= 2 and max(lags[4:]) > 0
    assert all(row["performance/controller_token_bytes"] == 0 for row in rows if row["step"] > 0)
