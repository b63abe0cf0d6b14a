"""Whole runs whose engines are SGLang's. The first one makes their environment, which takes minutes."""

import json

import pytest

from tests.functional.cli import BARE, CONFIGS, exact, example, keys, run, small
from tests.functional.test_agent_run import SMALL as AGENTS
from tests.functional.test_agent_run import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = CONFIGS / "grpo_math_sglang_cpu.yaml"
SMALL_STEPS = keys(grpo="num_prompts_per_step=8", policy="train_global_batch_size=64 train_micro_batch_size=64")
SGLANG = ("policy.generation.backend=sglang",)


@pytest.mark.parametrize(
    "filters", [(), keys(policy="generation.top_p=0.9 generation.top_k=20")], ids=["all", "filtered"]
)
def test_a_policy_trains_on_samples_of_sglang_which_has_its_weights_in_every_step(tmp_path, filters):
    finished = run(tmp_path, *BARE, *SMALL_STEPS, *filters, "grpo.max_num_steps=4", config=CONFIG, timeout_s=1000)
    exact(finished.metrics, 4)


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_weights_arrive_in_flight(tmp_path, recompute):
    """Samples under way begin anew with the new weights (`retract`), or keep what was computed with the old ones."""
    how = keys(grpo=f"max_num_steps=8 async_grpo.recompute_kv_cache_after_weight_updates={recompute}")
    config = example("grpo_math", "grpo_math_async_cpu")
    finished = run(tmp_path, *BARE, *SMALL_STEPS, *how, *SGLANG, **config, timeout_s=1500)
    steps = finished.steps
    assert [row["step"] for row in steps] == list(range(1, 9))
    lags = finished.curve("train/weight_version_lag/max")
    assert 0 < max(lags) <= 2
    assert not any(finished.curve("performance/controller_token_bytes"))


CRITIC = keys(value="train_global_batch_size=16 train_micro_batch_size=8")


def test_ppo_samples_with_it(tmp_path):
    how = (*small("ppo"), "ppo.max_num_steps=3", *CRITIC, *SGLANG)
    exact(run(tmp_path, *how, **example("ppo", "ppo_math_cpu"), timeout_s=1500).steps, 3)


def test_distillation_samples_with_it(tmp_path):
    how = (*small("distillation"), "distillation.max_num_steps=3", *SGLANG)
    finished = run(tmp_path, *how, **example("distillation", "distillation_math_cpu"), timeout_s=1500)
    assert [row["step"] for row in finished.steps] == [1, 2, 3] and min(finished.curve("train/grad_norm")) > 0


def test_agents_talk_to_it_through_the_server_and_their_rows_are_exact(tmp_path):
    finished = run(tmp_path, *AGENTS, *SGLANG, **example("grpo", "grpo_agent_cpu"), timeout_s=1500)
    exact(assert_whole(finished), 2)


def test_an_evaluation_samples_with_it(tmp_path):
    asked = keys(generation="backend=sglang sglang_cfg.dtype=float32", data="kwargs.num_samples=16")
    run(tmp_path, f"eval.save_path={tmp_path}", *asked, **example("eval", "evals/eval_cpu"), timeout_s=1500)
    overall = json.loads((tmp_path / "results.json").read_text())["overall"]
    assert 0 < overall["mean"] < 1
