"""The GRPO step and the loop around it, with fakes in place of workers."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.sampling_only import DiagnosticRun, diagnostic_config
from nemo_rl.algorithms.trainers.disagreement import NothingToCompare
from nemo_rl.algorithms.trainers.group_sources import PromptRequests, TooManyFailures
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.distributed.errors import WorkerError
from nemo_rl.models.policy.flops import find_gpu
from nemo_rl.models.policy.head.tasks import Logprobs, LogprobsTwice
from nemo_rl.report.recorder import RunRecorder
from nemo_rl.types import SampleStatus, SamplingParams
from nemo_rl.utils.config import ReportConfig
from tests.fakes import FakePolicy, FakeRollouts, handle, result, sample, sample_meta
from tests.unit.algorithms import fake_runs
from tests.unit.algorithms.fake_runs import GRPORun, alternate, small
from tests.unit.config.run_configs import build


def test_a_step_runs_its_phases_in_order_and_logs_one_line(tmp_path):
    run = GRPORun(tmp_path)
    rows = run.go()
    step = ["collect", "load", "reference", "train", "sync"]
    assert run.policy.calls == ["sync", *step, *step, "save", *step, "save"] and run.refit.versions == [0, 1, 2, 3]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["train/reward"] == 0.5 and rows[0]["train/loss"] == 0.5 and rows[0]["train/grad_norm"] == 1.0
    assert rows[0]["performance/controller_token_bytes"] == 0
    assert {"timing/train/generation", "timing/train/policy_training", "timing/train/total_step_time"} <= rows[0].keys()
    advantages = [s.advantage for rank in run.policy.plans[0].ranks for batch in rank.logprobs for s in batch]
    assert sorted(advantages) == pytest.approx([-1.41421] * 2 + [1.41421] * 2, abs=1e-4)


def test_on_a_known_gpu_the_report_has_prediction_and_measurement_of_each_phase(tmp_path):
    run = GRPORun(tmp_path, "grpo.max_num_steps=1")
    run.policy.gpu = find_gpu("NVIDIA H100 80GB HBM3")
    [row] = run.go()
    for phase in ("generation", "policy_and_reference_logprobs", "policy_training", "weight_sync"):
        assert f"timing/train/{phase}" in row
        assert row[f"performance/predicted_s/{phase}"] > row[f"performance/ideal_s/{phase}"] > 0
    assert row["performance/train_fp_utilization"] > 0


def test_previous_logprobs_have_a_pass_of_their_own_only_where_training_cannot_give_them(tmp_path):
    one = "grpo.max_num_steps=1", "grpo.skip_reference_policy_logprobs_calculation=true"
    once = GRPORun(tmp_path / "once", *one, "loss_fn.reference_policy_kl_penalty=0")
    assert "policy_and_reference_logprobs" not in str(once.go()[0])
    for number, key in enumerate(("policy.train_global_batch_size=2", "grpo.seq_logprob_error_threshold=2.0")):
        run = GRPORun(tmp_path / str(number), *one, "loss_fn.reference_policy_kl_penalty=0", key)
        run.go()
        assert run.policy.calls.index("logprobs") < run.policy.calls.index("train")
    assert "logprobs" not in once.policy.calls and "reference" not in once.policy.calls


def test_failed_samples_are_left_out_of_baseline_and_loss(tmp_path):
    three = ("grpo.num_generations_per_prompt=3", "policy.train_global_batch_size=6", "grpo.max_num_steps=1")
    half = "grpo.max_failed_sample_fraction=0.5"
    run = GRPORun(tmp_path, *three, half, reward=lambda request, index: (1.0, 0.0, None)[index])
    row = run.go()[0]
    planned = {s.index: s for rank in run.policy.plans[0].ranks for batch in rank.logprobs for s in batch}
    assert (planned[2].advantage, planned[2].mask) == (0.0, 0.0)
    assert planned[0].advantage == pytest.approx(1.41421, abs=1e-4) and planned[0].mask == 1.0
    assert row["train/num_failed_samples"] == 2 and row["train/reward"] == 0.5
    assert "the environment was out" in run.text.getvalue()


def test_too_many_failures_end_the_run_with_the_first_one_or_the_weights_that_caused_them(tmp_path):
    run = GRPORun(tmp_path, reward=lambda request, index: None)
    with pytest.raises(TooManyFailures, match=r"(?s)4 of 4 episodes failed.*the environment was out"):
        run.go()
    assert "train" not in run.policy.calls
    run.policy.bad_weights = WorkerError("weights are not finite", worker="policy-1", rank=1, method="inspect_weights")
    with pytest.raises(WorkerError, match="weights are not finite"):
        run.trainer.train()


def test_episodes_out_of_time_are_no_failures_and_end_the_run_when_all_are(tmp_path):
    run = GRPORun(tmp_path, "grpo.episode_timeout_s=30", "grpo.max_failed_sample_fraction=0")
    of_agents = "env.<name>.time_limit_s of their agents"
    for status, key in ((SampleStatus.TIMED_OUT, "grpo.episode_timeout_s=30"), (SampleStatus.AGENT_HUNG, of_agents)):
        late = sample_meta("g/0", 0.0, status=status)
        run.trainer.check_failures([handle(late, sample(1.0))])
        assert f"1 of 2 episodes took longer than {key}" in run.text.getvalue()
        with pytest.raises(TooManyFailures, match=rf"all 2 episodes took longer than {re.escape(key)}.*raise it"):
            run.trainer.check_failures([handle(late, late)])


def test_dynamic_sampling_asks_for_more_prompts_until_groups_differ(tmp_path):
    def of_odd_prompts(request: Any, index: int) -> float:
        return float(index) if int(request.prompt.prompt_id.split(":")[1]) % 2 else 1.0

    run = GRPORun(tmp_path, "grpo.use_dynamic_sampling=true", "grpo.max_num_steps=1", reward=of_odd_prompts)
    row = run.go()[0]
    assert len(run.policy.plans) == 1
    assert row["train/dynamic_sampling_num_gen_batches"] == run.policy.calls.count("collect") > 1


def test_a_loss_that_is_not_finite_can_be_skipped(tmp_path):
    run = GRPORun(tmp_path, "policy.nonfinite_action=skip")
    run.policy.results = [result(math.nan, skipped=1), result()]
    rows = run.go()
    assert [row["train/num_skipped_steps"] for row in rows] == [1, 0, 0]
    assert "optimizer steps were skipped" in run.text.getvalue()


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_only_a_loss_that_raises_the_likelihood_plans_it(tmp_path, weight):
    run = GRPORun(tmp_path, f"loss_fn.positive_example_nll_weight={weight}", "grpo.max_num_steps=1")
    run.go()
    rows = [row for plan in run.policy.plans for batch in plan.ranks[0].logprobs for row in batch]
    good = [row.nll_weight for row in rows if row.index % 2]  # rewards 0 and 1 by turns
    assert all(value > 0 for value in good) if weight else {row.nll_weight for row in rows} == {None}


class LossWithMore(ClippedPGLoss):
    """Of a user, with terms of which this library knows nothing."""


@pytest.mark.parametrize(
    ("kl", "loss", "has_experts", "share"),
    [(0, None, False, 0.5), (0.1, None, False, 0), (0, LossWithMore, False, 0), (0, None, True, 0)],
    ids=["no KL", "KL", "a loss of a user", "experts"],
)
def test_groups_of_equal_rewards_have_no_backward_pass_where_nothing_else_teaches(
    tmp_path, monkeypatch, kl, loss, has_experts, share
):
    def of_odd_prompts(request: Any, index: int) -> float:
        return float(index) if int(request.prompt.prompt_id.split(":")[1]) % 2 else 1.0

    def trainer(config: Any, *parts: Any) -> GRPOTrainer:
        return GRPOTrainer(config, *parts, None if loss is None else loss(config.loss_fn))

    monkeypatch.setattr(fake_runs, "FLOPS", replace(fake_runs.FLOPS, has_experts=has_experts))
    keys = f"loss_fn.reference_policy_kl_penalty={kl}", "grpo.max_num_steps=2", "data.shuffle=false"
    run = GRPORun(tmp_path, *keys, reward=of_odd_prompts, trainer=trainer)
    assert [row["train/packing/forward_only_share"] for row in run.go()] == pytest.approx([share, share])


@pytest.mark.parametrize(("setting", "task"), [("top_p=0.9", LogprobsTwice()), ("top_p=1.0", Logprobs())])
def test_a_filtered_policy_with_a_kl_penalty_is_scored_twice(tmp_path, setting, task):
    assert GRPORun(tmp_path, f"policy.generation.{setting}").trainer.task == task
    alone = GRPORun(tmp_path / "no_kl", f"policy.generation.{setting}", "loss_fn.reference_policy_kl_penalty=0")
    assert alone.trainer.task == Logprobs()


def test_validation_uses_its_own_group_ids_and_the_same_seeds_every_time(tmp_path):
    run = GRPORun(tmp_path, "grpo.val_period=1", "grpo.val_at_start=true", "grpo.val_num_generations_per_prompt=2")
    rows = run.go()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["validation/accuracy"] == 0.5 and row["validation/pass_at_2"] == 1.0 for row in rows)
    validation = [request for request in run.rollouts.requests if request.group_id.startswith("validation/")]
    assert {request.seed_step for request in validation} == {-1}
    assert [request.prompt.prompt_id for request in validation] == ["t:0", "t:1"] * 4
    assert len({request.group_id for request in validation}) == 8


def test_a_prompt_that_comes_twice_in_a_batch_has_other_seeds(tmp_path):
    def named(name: str, count: int) -> NamedRows:
        return NamedRows(name=name, task_name="t", rows=[{"problem": str(i)} for i in range(count)], weight=1)

    prompts = PromptDataLoader(PromptDataset([named("small", 4), named("large", 100)]), 16, seed=1)
    requests = PromptRequests(prompts, build(*small(tmp_path, "grpo")).grpo, SamplingParams(max_new_tokens=8))
    seeds = Counter((request.prompt.prompt_id, request.seed_step) for request in requests.next_batch())
    assert set(seeds.values()) == {1} and len({prompt_id for prompt_id, _ in seeds}) == 12
    assert sum(seed_step == 1 for _, seed_step in seeds) == 12, "those of other prompts are the number of the batch"


class Silent(FakePolicy):
    """Its rows have no tokens."""

    def inspect(self, function: Any, *args: Any) -> list[Any]:
        return [[]]

    def write_samples(self, step: int) -> None:
        self.note("write")

    def samples_written(self) -> list[str]:
        return []


def test_the_samples_of_a_step_are_written_before_an_investigation_loads_others(tmp_path):
    run = GRPORun(tmp_path, policy=Silent())
    run.policy.results[0].metrics["token_mult_prob_error"] = 9.0
    run.trainer.tools.recorder = RunRecorder(ReportConfig(), tmp_path, run.trainer.tools.console)
    run.trainer.step()
    assert run.policy.calls[-4:] == ["train", "sync", "write", "disagreement"]


def test_a_diagnosis_loads_every_row_of_an_agents_episode(tmp_path):
    class Branching(FakeRollouts):
        def _group(self, request):
            group = super()._group(request)
            group.samples[0].branches = [sample_meta("branch", 1.0)]
            return group

    diagnostic = partial(DiagnosticRun, checkpoint=None, found=[])
    run = GRPORun(tmp_path, trainer=diagnostic, policy=Silent(), rollouts=Branching(alternate, []))
    with pytest.raises(NothingToCompare):
        run.trainer.step()
    assert run.refit.announced == 0, "engines on the policy's GPUs keep their weights: none will follow"
    assert sum(len(batch) for rank in run.policy.plans[0].ranks for batch in rank.logprobs) == 2 * (2 + 1)


def test_a_diagnosis_takes_one_batch_of_fresh_samples_whatever_the_run_does(tmp_path):
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5")
    for own in (sampling, ("grpo.rollout_record.enabled=true",), (f"grpo.replay_from={tmp_path}",)):
        config = diagnostic_config(build(*small(tmp_path, "grpo"), *own))
        assert config.grpo.num_prompts_per_batch == config.policy.train_global_batch_size == 8
        assert config.grpo.replay_from is None and not config.grpo.rollout_record.enabled
