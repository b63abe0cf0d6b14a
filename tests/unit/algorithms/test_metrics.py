"""Metrics of rollouts, validation, tasks and devices, and their names in the configuration."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.trainers import metrics
from nemo_rl.types import SampleMeta, SampleStatus, StopReason, TurnMeta
from nemo_rl.utils.timer import GenerationUse
from tests.fakes import handle, rewarded, sample
from tests.unit.algorithms.fake_runs import GRPORun
from tests.unit.algorithms.losses.test_clipped_pg import one_row
from tests.unit.config.run_configs import build


def test_rollout_metrics_by_hand():
    truncated = sample(1.0, SampleStatus.TRUNCATED, prompt=4, generated=10, version=3)
    handles = [
        handle(sample(1.0, prompt=4, generated=6, env=2, turns=3, version=5), truncated),
        handle(sample(0.0, SampleStatus.FAILED), sample(1.0, prompt=8, generated=2, turns=2, version=5)),
        handle(*[sample(0.0, SampleStatus.PROMPT_TOO_LONG)] * 2),
    ]
    rates = {"natural_termination_rate": 2 / 3, "truncation_rate": 1 / 3, "repetition_loop_rate": 0.0}
    rates |= {"right_but_cut_rate": 1 / 3}
    rates |= {"failed_sample_rate": 1 / 6, "num_prompts_too_long": 1.0}
    turns = {"total_turns": 6.0, "avg_turns_per_sample": 2.0, "max_turns_per_sample": 3.0}
    tokens = {"mean_total": 12.0, "mean_gen": 6.0, "max_gen": 10.0, "mean_env": 2 / 3}
    tokens = {f"{name}_tokens_per_sample": number for name, number in tokens.items()}
    lags = {"weight_version_lag/mean": 2 / 3, "weight_version_lag/max": 2.0, "mean_prompt_length": 16 / 3}
    found = metrics.rollout_metrics(handles, current_weight_version=5)
    assert found == pytest.approx({"reward": 1.0} | rates | turns | tokens | lags)


def played(*turns: tuple[float, int], status: SampleStatus = SampleStatus.COMPLETED, **cut: bool) -> SampleMeta:
    """A sample of turns of (reward, generated tokens)."""
    made = sample(sum(r for r, _ in turns), status, generated=sum(n for _, n in turns), turns=len(turns))
    fixed: Any = {"num_env_tokens": 0, "stop_reason": StopReason.STOP, "weight_version": 0}
    fixed |= {"generation_s": 0.5, "env_s": 0.25}
    made.turns = [TurnMeta(num_generated_tokens=number, reward=reward, **fixed) for reward, number in turns]
    return replace(made, **cut)


def test_turn_metrics_by_hand():
    truncated = SampleStatus.TRUNCATED
    samples = [
        played((1.0, 4), (0.0, 6), (2.0, 2)),
        played((0.0, 8), status=truncated),
        played((0.5, 4), (0.5, 4), status=truncated, hit_turn_limit=True),
        played((0.0, 4), status=truncated, hit_total_token_limit=True),
        sample(status=SampleStatus.TIMED_OUT),
    ]
    rates = {"max_turns_reached": 0.25, "truncated_by_turn_tokens": 0.25, "truncated_by_total_tokens": 0.25}
    want = {f"{name}_rate": rate for name, rate in (rates | {"timed_out": 0.2}).items()}
    want |= {"mean_gen_tokens_per_turn": 32 / 7, "turn_4/active_fraction": 0.0}
    for turn, numbers in enumerate([(1.0, 0.375, 5.0), (0.5, 0.25, 5.0), (0.25, 2.0, 2.0)], start=1):
        names = (f"turn_{turn}/{name}" for name in ("active_fraction", "reward", "gen_tokens"))
        want |= dict(zip(names, numbers, strict=True))
    assert metrics.turn_metrics(samples, max_turns=4) == pytest.approx(want)
    assert metrics.turn_seconds(samples) == {"generation_s_per_turn": 0.5, "environment_s_per_turn": 0.25}
    assert metrics.turn_seconds(samples[-1:]) == {}


def test_pass_k_is_the_share_of_prompts_with_a_reward_above_zero():
    handles = [handle(sample(0.25), sample(0.0)), handle(sample(0.0), sample(0.0)), handle(sample(1.0), sample(0.0))]
    handles.append(handle(*[sample(0.0, SampleStatus.FAILED)] * 2))
    assert metrics.validation_metrics(handles, k_values=[1, 2])["pass_k"] == pytest.approx(2 / 3)
    assert "pass_k" not in metrics.validation_metrics(handles)


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=7), data=st.data())
def test_best_of_k_is_the_mean_over_all_draws_and_pass_at_k_the_same_for_binary_rewards(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    draws = [max(draw) for draw in combinations(rewards, k)]
    assert metrics.best_of_k(rewards, k) == pytest.approx(sum(draws) / len(draws), abs=1e-9)
    correct = [reward > 0 for reward in rewards]
    assert metrics.pass_at_k(len(correct), sum(correct), k) == pytest.approx(metrics.best_of_k(correct, k))


def test_validation_metrics_by_hand():
    groups = [rewarded(1.0, 0.0, 0.0, 0.0), rewarded(0.5, 1.0, 1.0, 1.0)]
    found = metrics.validation_metrics([*groups, handle(sample(1.0), sample(0.0, SampleStatus.FAILED))], k_values=(2,))
    want = {"accuracy": 5 / 9, "reward": 5.5 / 9, "avg_length": 10.0, "failed_sample_rate": 1 / 10}
    want |= dict.fromkeys(("pass_at_2", "best_of_2"), (0.5 + 1.0) / 2)  # the third prompt has one rewarded sample
    assert {name: found[name] for name in want} == pytest.approx(want)


def test_performance_metrics_by_hand():
    timings = {"total_step_time": 10.0, "generation": 4.0, "policy_and_reference_logprobs": 1.0, "policy_training": 4.0}
    sizes = {"num_samples": 20, "num_tokens": 1000, "num_training_devices": 2, "num_generation_devices": 2}
    use = GenerationUse(busy_s=5.0, window_s=10.0, num_tokens=500)
    found = metrics.performance_metrics(timings, use, **sizes, num_devices=4)
    whole = {"samples_per_sec": 2.0, "tokens_per_sec": 100.0, "generation_tokens_per_sec": 100.0}
    per_gpu = {"samples_per_sec": 0.5, "tokens_per_sec": 25.0, "policy_training_tokens_per_sec": 125.0}
    per_gpu |= {"policy_and_reference_logprobs_tokens_per_sec": 500.0, "training_worker_group_tokens_per_sec": 100.0}
    per_gpu |= {"generation_tokens_per_sec": 50.0}
    want = whole | {f"{name}_per_gpu": value for name, value in per_gpu.items()}
    want |= {"training_worker_group_tokens_per_sec": 200.0, "exposed_generation_s": 4.0}
    assert found == want | {"training_idle_fraction": 0.4, "generation_idle_fraction": 0.5}
    idle = replace(use, busy_s=0.0, num_tokens=0)
    replayed = metrics.performance_metrics(timings, idle, **sizes, num_devices=4)
    assert set(found) - set(replayed) == {"generation_tokens_per_sec", "generation_tokens_per_sec_per_gpu"}


def test_what_is_reported_has_a_name_in_the_configuration() -> None:
    config = build("grpo.val_num_generations_per_prompt=6")
    found = metrics.validation_metrics([rewarded(*[0.0, 1.0] * 3)], k_values=config.grpo.val_k_values)
    assert config.val_metrics == set(found)
    found = metrics.rollout_metrics([rewarded(0.0, 1.0)], current_weight_version=0)
    batch, one = one_row([0.5], [0.5], 1.0), torch.tensor(1.0)
    found |= {name: float(value) for name, value in ClippedPGLoss(ClippedPGLossConfig())(*batch, one, one)[1].items()}
    assert set(found) <= config.train_metrics


TWO_TASKS = (
    "data.train=[{dataset_name: arithmetic, weight: 3.0}, {dataset_name: arithmetic, env_name: other, weight: 1.0}]",
    "data.validation=[{dataset_name: arithmetic}, {dataset_name: arithmetic, env_name: other}]",
    "+env.other.type=math",
)


def test_each_task_is_told_apart_by_hand():
    long, failed = sample(0.0, SampleStatus.TRUNCATED, generated=8), sample(0.0, SampleStatus.FAILED)
    groups = [
        handle(sample(1.0), sample(0.0), task="sums"),
        handle(sample(1.0, generated=4, turns=3), long, task="codes"),
        handle(failed, failed, task="codes"),
    ]
    of_rollouts = partial(metrics.rollout_metrics, current_weight_version=0)
    found = metrics.by_task(of_rollouts, groups, ["sums", "codes", "absent"], metric_names.TASK)
    of_codes = {f"codes/{name}" for name in (*metric_names.TASK, "num_samples")}
    assert {name for name in found if name.startswith("codes/")} == of_codes
    assert (found["codes/num_samples"], found["codes/reward"], found["codes/failed_sample_rate"]) == (4, 0.5, 0.5)
    assert found["sums/reward"] == 0.5
    assert {name for name in found if name.startswith("absent/")} == {"absent/num_samples"}
    assert metrics.by_task(of_rollouts, groups, ["sums"]) == {}


def test_a_run_reports_its_tasks_under_names_that_the_configuration_knows(tmp_path):
    larger = ("grpo.num_prompts_per_step=4", "policy.train_global_batch_size=8", "policy.train_micro_batch_size=8")
    tasks = ("arithmetic", "arithmetic#2")
    run = GRPORun(tmp_path, *larger, "grpo.val_period=1", "checkpointing.enabled=false", *TWO_TASKS, tasks=tasks)
    [row, *_], config, names = run.go(), run.trainer.config, tuple(f"{task}/" for task in tasks)
    found = {name for logged in row if (name := logged.removeprefix("train/")).startswith(names)}
    assert found == {name for name in config.train_metrics if name.startswith(names)}
    assert row["train/arithmetic/reward"] == 0.5
    assert sum(row[f"train/{task}/num_samples"] for task in tasks) == 8
