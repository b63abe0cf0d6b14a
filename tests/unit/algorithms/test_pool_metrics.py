"""Which of training and generation waits for the other."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.trainers.metrics import idle_metrics, idle_verdict
from nemo_rl.rollouts.rollout_worker import GenerationUse


def use(busy_s: float) -> GenerationUse:
    return GenerationUse(busy_s=busy_s, window_s=10.0, num_tokens=0)


def test_in_turns_each_side_idles_while_the_other_works():
    seconds = {"generation": 6.0, "policy_training": 3.5, "weight_sync": 0.5, "total_step_time": 10.0}
    assert idle_metrics(seconds, use(6.0)) == pytest.approx(
        {"training_idle_fraction": 0.6, "generation_idle_fraction": 0.4, "exposed_generation_s": 6.0}
    )


def test_side_by_side_only_what_is_waited_for_is_exposed():
    seconds = {"exposed_generation": 1.0, "wait_for_rollouts": 0.5, "policy_training": 8.5, "total_step_time": 10.0}
    metrics = idle_metrics(seconds, use(5.9))
    assert metrics["exposed_generation_s"] == 1.5 and metrics["training_idle_fraction"] == pytest.approx(0.15)
    assert idle_verdict(metrics) == "generation starves: 41% idle"


def test_the_verdict_names_the_side_that_waits():
    seconds = {"exposed_generation": 3.5, "policy_training": 6.5, "total_step_time": 10.0}
    assert idle_verdict(idle_metrics(seconds, use(10.0))) == "training waits for rollouts 35%"
    assert idle_verdict(idle_metrics(seconds, use(6.2))) == "training idle 35%, generation 38%"
