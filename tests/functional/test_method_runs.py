"""Other ways to train learn, each by its guide's first command; and the twins of recipes of methods run two steps."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.rollouts.records import read_index, recorded_steps
from tests.functional import cli, third_engine
from tests.functional.cli import BARE, SMALL, continues_bit_for_bit, ends, exact, example, keys, learned, run, small
from tests.unit.config.test_methods import GRPO, twin
from tests.unit.generation.models import make_model_with_heads

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

ASYNC = example("grpo_math", "grpo_math_async_cpu")
PPO = example("ppo", "ppo_math_cpu")
DISTILLATION = example("distillation", "distillation_math_cpu")


# Each of these is the README's first command with another penalty, or has nothing that other runs of this file lack.
REPEATED = ("deepscaler", "fp8-rollouts", "grpo-llama3.3-70b", "long-context", "reward-model")
TWINS = [path for path in GRPO if not path.stem.startswith(REPEATED)]


@pytest.mark.parametrize("recipe", TWINS, ids=lambda path: path.stem)
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
        *keys(distillation="max_num_steps=2 val_period=0", checkpointing="enabled=false"),
    )
    finished = run(tmp_path, *overrides, **DISTILLATION)
    assert finished.curve("train/global_valid_seqs") == [16, 16]


def test_ppo_learns_arithmetic(tmp_path):
    finished = run(tmp_path, "ppo.max_num_steps=15", **PPO)
    learned(finished.curve("validation/accuracy"))
    exact(finished.steps, 15)
    (reward, more), (loss, less) = (ends(finished.steps, name) for name in ("train/reward", "train/value/loss"))
    assert more > reward + 0.1 and less < loss / 3, (reward, more, loss, less)


def test_a_killed_run_of_ppo_continues_bit_for_bit(tmp_path):
    """With the reference policy, and a value model in micro-batches of its own."""
    overrides = keys(
        ppo="max_num_steps=6 skip_reference_policy_logprobs_calculation=false",
        loss_fn="reference_policy_kl_penalty=0.01 use_kl_in_reward=true",
        value="train_global_batch_size=8 train_micro_batch_size=4",
    )
    continues_bit_for_bit(tmp_path, *small("ppo"), *overrides, **PPO, models=("policy", "value"))


def test_the_tiny_model_learns_to_solve_2x2(tmp_path):
    """All 11 boards of the sliding puzzle, sampled at temperature 1 as in training; half of the example's games."""
    batch = ("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=128")
    steps = ("grpo.max_num_steps=10", "grpo.val_period=10")
    finished = run(tmp_path, *batch, *steps, **example("grpo_sliding_puzzle"))
    success = finished.curve("validation/accuracy")
    assert success[0] < 0.6 and success[-1] - success[0] >= 0.3, success
    exact(finished.steps, 10)
    moves = finished.curve("train/avg_turns_per_sample")
    assert sum(moves[-5:]) < sum(moves[:5]) and max(moves) > 1, moves
    assert not any(finished.curve("train/failed_sample_rate"))


# -- generation apart from training


def test_weights_arrive_in_flight_and_it_learns(tmp_path):
    more = "async_grpo.group_order=arrival async_grpo.recompute_kv_cache_after_weight_updates=true"
    overrides = keys(grpo=more, policy="train_micro_batch_size=256")
    finished = run(tmp_path, *overrides, **ASYNC)
    learned(finished.curve("validation/accuracy"))
    lags = finished.curve("train/weight_version_lag/max")
    assert max(lags) <= 2 and max(lags[4:]) > 0
    assert not any(finished.curve("performance/controller_token_bytes"))


@pytest.mark.timeout(1800)
def test_one_engine_four_beside_training_and_two_apart_sample_the_same_tokens(tmp_path):
    """Every metric but clocks, validation included, is the same number: so are the tokens, logprobs and weights.

    Four ranks of training, which share sequences and layers, add in another order: their first samples, loss and
    gradient norm are compared.
    """
    short = (*SMALL, "grpo.max_num_steps=3", "grpo.val_period=3", "checkpointing.enabled=false")
    one = run(tmp_path / "one", *short).steps
    exact(one, 3)
    cut = keys(policy="dtensor_cfg.tensor_parallel_size=2 dtensor_cfg.context_parallel_size=2")
    four_ranks = ("grpo.max_num_steps=1", "cluster.cpu_workers_per_node=4", *cut)
    [four] = run(tmp_path / "four", *short, *four_ranks).steps
    for name in ("train/reward", "train/total_turns", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert one[0][name] == four[name], name
    assert four["train/loss"] == pytest.approx(one[0]["train/loss"], abs=1e-6)
    assert four["train/grad_norm"] == pytest.approx(one[0]["train/grad_norm"], rel=1e-5)
    more = keys(cluster="cpu_workers_per_node=3", policy="generation.colocated.resources.cpu_workers_per_node=2")
    two = run(tmp_path / "two", *short, *more, **example("grpo_math", "grpo_math_cpu_split"))
    assert "refit over packed_collective" in two.output
    assert cli.comparable(two.steps) == cli.comparable(one)


# -- drafts that train beside the policy

DRAFT = (
    *SMALL,
    *keys(grpo="num_prompts_per_step=16 val_period=0 val_at_end=false max_num_steps=8"),
    *keys(policy="train_global_batch_size=64 train_micro_batch_size=64"),
    *keys(checkpointing="metric_name=null save_period=4"),
    "+policy.draft={enabled: true, lr: 3.0e-3}",
    "+policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 3}",
)
PREDICTION = (
    *DRAFT[:-1],
    *keys(grpo="max_num_steps=6", policy="draft.lr=1e-2 generation.temperature=0.3"),
    "+policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 1}",
)


def test_acceptance_rises_while_the_draft_trains_and_a_resumed_run_is_the_same(tmp_path):
    rows = run(tmp_path / "whole", *DRAFT).steps
    exact(rows, 8)
    rates = [row["train/generation/spec_acceptance_rate"] for row in rows]
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.1, rates
    assert rows[-1]["train/draft_loss"] < rows[0]["train/draft_loss"]
    kept = "results/grpo_cpu/step_4"
    shutil.copytree(tmp_path / "whole" / kept, tmp_path / "resumed" / kept)
    assert cli.comparable(run(tmp_path / "resumed", *DRAFT).steps) == cli.comparable(rows[4:])


def test_a_prediction_head_learns_and_the_engine_drafts_with_what_it_learned(tmp_path):
    """Training measures the same acceptance on the samples of a step as the engine did when it drew them."""
    finished = run(tmp_path, *PREDICTION, f"policy.model_name={make_model_with_heads(tmp_path / 'model')}")
    told = finished.curve("train/draft_acceptance")
    seen = finished.curve("train/generation/spec_acceptance_rate")
    assert finished.curve("train/token_mult_prob_error") == pytest.approx([1.0] * 6, abs=1e-5)
    assert told[-1] > told[0] + 0.05, "the random policy earns no reward, so its head alone learns"
    assert all(abs(a - b) < 0.07 for a, b in zip(told, seen, strict=True))


# -- recorded runs, trained again from their record without engines


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training metrics of each step, which must agree to the last bit."""
    return [{k: v for k, v in row.items() if k.startswith("train/") and k != "train/buffer_size"} for row in rows]


def recording(folder: Path) -> str:
    return f"grpo.rollout_record={{enabled: true, save_dir: {folder}}}"


def test_experts_of_generation_are_taken_recorded_and_replayed_bit_for_bit(tmp_path):
    record = tmp_path / "record"
    policy = "model_name=tiny:arithmetic-moe router_replay.enabled=true megatron_cfg.freeze_moe_router=false"
    moe = (*SMALL, *BARE, *keys(grpo="max_num_steps=2", checkpointing="metric_name=null", policy=policy))
    how = example("grpo_math", "grpo_math_megatron_cpu")
    recorded = run(tmp_path / "recorded", *moe, recording(record), **how).steps
    first = recorded[0]
    num_tokens = first["train/total_num_tokens"]
    num_samples = num_tokens / first["train/mean_total_tokens_per_sample"]
    assert first["train/moe/replayed_fraction"] == pytest.approx(1 - num_samples / num_tokens), "all but the last ones"
    assert first["train/moe/replay_agreement"] > 0.99
    assert first["performance/routed_experts_bytes"] == (num_tokens - num_samples) * 2 * 2, "2 layers, 2 experts each"
    replayed = run(tmp_path / "replayed", *moe, f"grpo.replay_from={record}", **how).steps
    assert trained(replayed) == trained(recorded)


def test_an_asynchronous_run_is_replayed_bit_for_bit(tmp_path):
    """In-flight updates and order of arrival: the record alone knows what was trained when."""
    record = tmp_path / "record"
    asked = (*SMALL, *BARE, "grpo.async_grpo.group_order=arrival", "checkpointing.metric_name=null")
    recorded = run(tmp_path / "recorded", *asked, recording(record), **ASYNC)
    want = trained(recorded.steps)
    assert recorded_steps(record) == [1, 2, 3, 4] and "4 steps of rollouts" in recorded.output
    again = (*asked, f"grpo.replay_from={record}")
    replayed = run(tmp_path / "replayed", *again, "grpo.max_num_steps=9", **ASYNC)
    assert trained(replayed.steps)[:4] == want
    assert f"the record in {record} ends with step 4" in replayed.output and "vllm" not in replayed.output.lower()
    assert len(want) == 4 and all(row["train/grad_norm"] > 0 for row in want)
    assert max(row["train/weight_version_lag/max"] for row in want) >= 1
    assert read_index(record, 3).weight_version == 2

    more = ("grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=32")
    refused = run(tmp_path / "refused", *again, *more, **ASYNC, status=2)
    assert "rollouts.num_generations_per_prompt" in refused.output, refused.output[-2000:]


def test_an_engine_of_a_user_s_own_trains_by_its_path(tmp_path):
    engine = f"policy.generation.backend={third_engine.__name__}:{third_engine.ThirdGeneration.__name__}"
    few = keys(grpo="num_prompts_per_step=2 num_generations_per_prompt=4 max_num_steps=2")
    batch = keys(policy="train_global_batch_size=8 train_micro_batch_size=8")
    exact(run(tmp_path, *BARE, *few, *batch, engine).metrics, 2)
