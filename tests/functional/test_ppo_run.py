"""Whole runs of PPO: learning, resuming."""

import time

import pytest

from tests.functional.cli import ROOT, continues_bit_for_bit, run, small

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SCRIPT = ROOT / "examples" / "run_ppo.py"
CPU_CONFIG = ROOT / "examples" / "configs" / "ppo_math_cpu.yaml"


def test_ppo_learns_arithmetic(tmp_path):
    """The guide's first command, on its own configuration."""
    started = time.monotonic()
    finished = run(tmp_path, script=SCRIPT, config=CPU_CONFIG)
    assert finished.status == 0, finished.output[-4000:]
    assert time.monotonic() - started < 300
    rows = finished.metrics
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    steps = [row for row in rows if row["step"] > 0]
    fifth = len(steps) // 5
    mean = {
        name: [sum(row[name] for row in part) / fifth for part in (steps[:fifth], steps[-fifth:])]
        for name in ("train/reward", "train/value/loss")
    }
    assert mean["train/reward"][1] > mean["train/reward"][0] + 0.1, mean
    assert mean["train/value/loss"][1] < mean["train/value/loss"][0] / 3, mean
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)


def test_a_run_killed_at_any_moment_continues_bit_for_bit(tmp_path):
    """With the reference policy, and a value model in micro-batches of its own."""
    overrides = (
        *small("ppo"),
        "ppo.max_num_steps=6",
        "ppo.skip_reference_policy_logprobs_calculation=false",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.use_kl_in_reward=true",
        "value.train_global_batch_size=8",
        "value.train_micro_batch_size=4",
    )
    models = ("policy", "value")
    continues_bit_for_bit(tmp_path, *overrides, script=SCRIPT, config=CPU_CONFIG, models=models)
