"""Other ways to train learn, each by its guide's first command; and the twins of recipes of methods run two steps."""

import json
import math

import pytest
import yaml

from tests.functional.cli import (
    CONFIGS,
    SMALL,
    comparable,
    continues_bit_for_bit,
    ends,
    exact,
    example,
    learned,
    run,
    small,
)
from tests.unit.config.test_methods import GRPO, twin

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PPO = example("ppo", "ppo_math_cpu")
DISTILLATION = example("distillation", "distillation_math_cpu")


@pytest.mark.parametrize("recipe", GRPO, ids=lambda path: path.stem)
def test_a_twin_runs_two_steps(recipe, tmp_path):
    config = tmp_path / "twin.yaml"
    config.write_text(yaml.safe_dump(twin(recipe)))
    steps = ("grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.val_period=0", "checkpointing.enabled=false")
    rows = run(tmp_path, *SMALL, *steps, config=config).steps
    assert len(rows) == 2
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows), rows
    # An asynchronous run also has samples of older weights.
    fresh = [row for row in rows if row.get("train/weight_version_lag/max", 0) == 0]
    assert fresh and all(row["train/token_mult_prob_error"] <= 1.00001 for row in fresh), rows


def test_a_student_learns_what_the_teacher_knows(tmp_path):
    finished = run(tmp_path, **DISTILLATION)
    learned(finished.curve("validation/accuracy"))
    assert not any(finished.curve("performance/controller_token_bytes"))
    for name in ("train/loss", "train/forward_kl", "train/reverse_kl"):
        first, last = ends(finished.steps, name)
        assert last < first / 4, (name, first, last)


def test_two_teachers_apart_from_the_student(tmp_path):
    """A better model teaches sums, a second student differences, on two ranks of machines of their own."""
    for name, sign in (("sums", 1), ("differences", -1)):
        text = "+" if sign == 1 else "-"
        rows = [{"input": f"{a}{text}{b}", "output": str(a + sign * b)} for a in range(5) for b in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        *small("distillation"),
        "teacher=null",
        "+teachers={good: {model_name: tiny:arithmetic-teacher}, same: {model_name: tiny:arithmetic}}",
        "distillation.task_to_teacher={sums: good, differences: same}",
        "data.train=[{data_path: sums.jsonl}, {data_path: differences.jsonl}]",
        "distillation.teacher_resources={gpus_per_node: 0, cpu_workers_per_node: 2}",
        "distillation.max_num_steps=2",
        "distillation.val_period=0",
        "checkpointing.enabled=false",
    )
    finished = run(tmp_path, *overrides, **DISTILLATION)
    assert finished.curve("train/global_valid_seqs") == [16, 16]


def test_ppo_learns_arithmetic(tmp_path):
    finished = run(tmp_path, **PPO)
    learned(finished.curve("validation/accuracy"))
    exact(finished.steps, 25)
    (reward, more), (loss, less) = (ends(finished.steps, name) for name in ("train/reward", "train/value/loss"))
    assert more > reward + 0.1 and less < loss / 3, (reward, more, loss, less)


def test_a_killed_run_of_ppo_continues_bit_for_bit(tmp_path):
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
    continues_bit_for_bit(tmp_path, *overrides, **PPO, models=("policy", "value"))


def test_the_tiny_model_learns_to_solve_2x2(tmp_path):
    """All 11 boards of the sliding puzzle, sampled at temperature 1 as in training, up to eight moves."""
    finished = run(tmp_path, **example("grpo_sliding_puzzle"))
    success = finished.curve("validation/accuracy")
    assert success[0] < 0.6 and success[-1] - success[0] >= 0.3, success
    exact(finished.steps, 20)
    moves = finished.curve("train/avg_turns_per_sample")
    assert sum(moves[-5:]) < sum(moves[:5]) and max(moves) > 1, moves
    assert not any(finished.curve("train/failed_sample_rate"))


# -- generation apart from training


def test_weights_arrive_in_flight_and_it_learns(tmp_path):
    overrides = (
        "grpo.async_grpo.group_order=arrival",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
        "policy.train_micro_batch_size=256",
    )
    finished = run(tmp_path, *overrides, config=CONFIGS / "grpo_math_async_cpu.yaml")
    learned(finished.curve("validation/accuracy"))
    lags = finished.curve("train/weight_version_lag/max")
    assert max(lags) <= 2 and max(lags[4:]) > 0
    assert not any(finished.curve("performance/controller_token_bytes"))


@pytest.mark.timeout(900)
def test_one_and_four_generation_workers_sample_the_same_tokens(tmp_path):
    """Every metric but clocks, validation included, is the same number: so are the tokens, logprobs and weights."""
    short = (*SMALL, "grpo.max_num_steps=3", "grpo.val_period=3", "checkpointing.enabled=false")
    config, resources = CONFIGS / "grpo_math_cpu_split.yaml", "policy.generation.colocated.resources"
    one = run(tmp_path / "one", *short, config=config)
    assert "refit over packed_collective" in one.output
    exact(one.steps, 3)
    more = ("cluster.cpu_workers_per_node=5", f"{resources}.cpu_workers_per_node=4")
    assert comparable(run(tmp_path / "four", *short, *more, config=config).steps) == comparable(one.steps)
    colocated = run(tmp_path / "colocated", *short)
    assert comparable(colocated.steps) == comparable(one.steps), "where it generates changes nothing either"
