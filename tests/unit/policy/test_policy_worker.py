"""What a policy worker does in a step: precisions, losses that are not finite, masks, and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.plan.batch import Batching, plan_batch
from nemo_rl.models.policy.batch.samples import SampleSettings
from nemo_rl.models.policy.config import DTensorConfig, OptimizerConfig, SchedulerConfig
from nemo_rl.models.policy.convert import convert_checkpoint as convert
from nemo_rl.models.policy.dtensor.model import trainable
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.pretrained import DTYPES
from nemo_rl.report.run_files import read_block
from nemo_rl.types import (
    LossInputs,
    TrainResult,
)
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import save_random_model
from tests.unit.policy.steps import (
    LOSS,
    NUM_GENERATIONS,
    NUM_GROUPS,
    Step,
    load_step,
    make_groups,
    make_worker,
    one_step,
    policy_config,
    whole_weights,
)
from tests.worlds import run_world


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    save_random_model("qwen2-tied", path)
    return path


@pytest.fixture(scope="module")
def alone(model_path: Path) -> Step:
    """One rank, one micro-batch per optimizer step: nothing was split."""
    return run_world(one_step, 1, model_path, policy_config(train_micro_batch_size=8))[0]


def test_the_first_logprobs_equal_the_reference_and_training_moves_only_the_policy(model_path):
    def rank_main(rank: int, world: int) -> tuple[float, float, float]:
        config = policy_config()
        worker = make_worker(model_path, config)
        load_step(worker, config)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        before = max(
            (r.columns["prev_logprobs"] - r.columns["reference_policy_logprobs"]).abs().max().item()
            for r in worker.rows.values()
        )
        first = next(iter(worker.rows.values())).columns["reference_policy_logprobs"].clone()
        worker.train(ClippedPGLoss(LOSS), Logprobs())
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        row = next(iter(worker.rows.values()))
        return (
            before,
            (row.columns["reference_policy_logprobs"] - first).abs().max().item(),
            (row.columns["prev_logprobs"] - first).abs().max().item(),
        )

    for before, reference_moved, policy_moved in run_world(rank_main, 2):
        assert before == 0.0
        assert reference_moved == 0.0
        assert policy_moved > 1e-3


def test_one_optimizer_step_needs_no_pass_of_its_own_for_the_previous_logprobs(model_path):
    def rank_main(rank: int, world: int, *, score: bool) -> TrainResult:
        config = policy_config(train_global_batch_size=16)
        worker = make_worker(model_path, config)
        load_step(worker, config)
        if score:
            worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        return worker.train(ClippedPGLoss(LOSS), Logprobs())

    scored = run_world(lambda rank, world: rank_main(rank, world, score=True), 1)[0]
    unscored = run_world(lambda rank, world: rank_main(rank, world, score=False), 1)[0]
    assert unscored.losses == pytest.approx(scored.losses, rel=1e-6)
    for name, value in scored.metrics.items():
        assert unscored.metrics[name] == pytest.approx(value, rel=2e-6, abs=1e-6), name


@pytest.mark.parametrize(("precision", "master"), [("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_mixed_and_pure_bfloat16_train_like_float32_to_their_precision(model_path, alone, precision, master):
    config = policy_config(precision=precision, master_precision=master, train_micro_batch_size=4)
    step = run_world(one_step, 2, model_path, config)[0]
    result, weights = step.result, step.weights
    want, want_weights = alone.result, alone.weights
    assert result.losses == pytest.approx(want.losses, rel=0.1, abs=0.02)
    assert result.grad_norms == pytest.approx(want.grad_norms, rel=0.1)
    assert {weight.dtype for weight in weights.values()} == {DTYPES[master]}
    for name, weight in weights.items():
        # One part in 128 is what bfloat16 rounds away; float32 master weights keep what a small step adds.
        assert (weight.float() - want_weights[name]).abs().max() < (0.02 if master == "bfloat16" else 0.01), name


class NanLoss:
    """Not finite for samples with token 7 anywhere."""

    inputs_type = LossInputs

    def __call__(self, logprobs: torch.Tensor, inputs: LossInputs, seqs: torch.Tensor, toks: torch.Tensor) -> Any:
        bad = (inputs.input_ids == 7).any() * float("nan") if (inputs.input_ids == 7).any() else torch.zeros(())
        return logprobs.sum() / toks + bad, {}


class NanOnRankZero:
    """Not finite in every micro-batch of rank 0, fine elsewhere."""

    inputs_type = LossInputs

    def __call__(self, logprobs: torch.Tensor, inputs: LossInputs, seqs: torch.Tensor, toks: torch.Tensor) -> Any:
        return logprobs.sum() / toks + (float("nan") if dist.get_rank() == 0 else 0.0), {}


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_ranks_after_the_same_step(model_path):
    def rank_main(rank: int, world: int) -> TrainResult:
        config = policy_config(nonfinite_action="stop", train_micro_batch_size=1, train_global_batch_size=4)
        worker = make_worker(model_path, config)
        load_step(worker, config)
        worker.compute(Logprobs(), "prev_logprobs")
        return worker.train(NanOnRankZero(), Logprobs())

    first, second = run_world(rank_main, 2, timeout=40)
    assert len(first.losses) == len(second.losses) == 1, "of four optimizer steps"
    assert len(first.nonfinite_samples) == 2 and second.nonfinite_samples == []


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_loss_that_is_not_finite_changes_nothing_and_names_its_samples(model_path, action):
    def rank_main(rank: int, world: int) -> tuple[TrainResult, bool]:
        config = policy_config(nonfinite_action=action, train_micro_batch_size=1, train_global_batch_size=16)
        worker = make_worker(model_path, config)
        load_step(worker, config)
        before = [p.to_local().clone() for p in trainable(worker.stages)]
        result = worker.train(NanLoss(), Logprobs())
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, trainable(worker.stages), strict=True))
        return result, same

    results = run_world(rank_main, 2)
    _, groups = make_groups()
    guilty = {s.meta.sample_id for group in groups for s in group.samples if (s.token_ids == 7).any()}
    assert 0 < len(guilty) < 16
    assert {name for result, _ in results for name in result.nonfinite_samples} == guilty
    assert all(same and result.num_skipped_steps == 1 for result, same in results)


def test_samples_whose_logprobs_disagree_are_masked_and_counted(model_path):
    def rank_main(rank: int, world: int) -> tuple[dict[str, float], list[str]]:
        config = policy_config()
        worker = make_worker(model_path, config)
        load_step(worker, config)
        worker.compute(Logprobs(), "prev_logprobs")
        for row in worker.rows.values():
            row.columns["generation_logprobs"] = (
                row.columns["prev_logprobs"] + (2.0 if row.sample_id == "0/1" else 0.01) * row.token_mask
            )
        report = worker.mask_sequences_by_importance(1.5)
        return report, [row.sample_id for row in worker.rows.values() if row.mask == 0.0]

    results = run_world(rank_main, 2)
    assert results[0][0] == results[1][0]
    assert results[0][0]["num_masked_seqs_by_logprob_error"] == 1
    assert results[0][0]["max_seq_mult_prob_error"] == pytest.approx(math.exp(2.0), rel=1e-5)
    assert sorted(results[0][1] + results[1][1]) == ["0/1", "1/2"]  # 1/2 failed in its episode


SCHEDULE = [
    SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 3}),
    SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 10}),
    SchedulerConfig(milestones=[3]),
]
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 0.01, "weight_decay": 0.1})


@pytest.mark.parametrize(("world", "save_format"), [(1, "torch_save"), (2, "safetensors")])
def test_a_resumed_policy_continues_like_the_one_that_went_on(model_path, tmp_path, world, save_format):
    config = policy_config(optimizer=ADAMW, scheduler=SCHEDULE)

    def train_once(worker: DTensorPolicyWorker, rank: int, world: int) -> TrainResult:
        load_step(worker, config)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        return worker.train(ClippedPGLoss(LOSS), Logprobs())

    def weights(worker: DTensorPolicyWorker) -> dict[str, torch.Tensor]:
        return whole_weights(worker)

    def goes_on(rank: int, world: int) -> Any:
        worker = make_worker(model_path, config)
        train_once(worker, rank, world)
        worker.save_checkpoint(tmp_path, SaveRequest(save_consolidated=True, model_save_format=save_format))
        return train_once(worker, rank, world), weights(worker)

    def resumes(rank: int, world: int) -> Any:
        worker = make_worker(model_path, config)
        worker.load_checkpoint(tmp_path, load_optimizer=True)
        return train_once(worker, rank, world), weights(worker)

    want, want_weights = run_world(goes_on, world)[0]
    got, got_weights = run_world(resumes, world)[0]
    assert got.learning_rates == want.learning_rates
    assert want.learning_rates == pytest.approx([0.007, 0.01]), "the scheduler steps once per optimizer step"
    assert got == want
    assert all(torch.equal(got_weights[name], want_weights[name]) for name in want_weights)

    # The consolidated weights and those converted from the shards are the ones that were saved.
    from transformers import AutoModelForCausalLM

    (tmp_path / "policy" / "tokenizer").mkdir()
    convert(tmp_path, tmp_path / "converted")
    consolidated = AutoModelForCausalLM.from_pretrained(tmp_path / "policy" / "weights" / "consolidated").state_dict()
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").state_dict()
    started = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    assert converted.keys() == started.keys()
    assert all(torch.equal(converted[name], consolidated[name]) for name in converted)
    assert not torch.equal(converted["model.norm.weight"], started["model.norm.weight"])


def test_an_optimizer_or_argument_that_does_not_exist_is_refused_by_key(model_path):
    from nemo_rl.models.policy.dtensor.optimizer import build_optimizer

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match=r"policy\.optimizer\.name 'torch\.optim\.AdamZ': module"):
        build_optimizer(policy_config(optimizer=OptimizerConfig(name="torch.optim.AdamZ")), parameters)
    with pytest.raises(ValueError, match=r"policy\.optimizer\.kwargs: SGD does not take learning_rate; it takes: lr"):
        sgd = OptimizerConfig(name="torch.optim.SGD", kwargs={"learning_rate": 1.0})
        build_optimizer(policy_config(optimizer=sgd), parameters)
    with pytest.raises(ValueError, match=r"is not a torch\.optim\.optimizer\.Optimizer"):
        build_optimizer(policy_config(optimizer=OptimizerConfig(name="torch.nn.Linear", kwargs={})), parameters)


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_reported_rows_are_written_by_the_rank_that_has_their_outputs(model_path, tmp_path, layout):
    """Once each, with the logprobs of the training pass itself; and rows that are not reported are not kept."""
    config = policy_config(train_global_batch_size=NUM_GROUPS * NUM_GENERATIONS, train_micro_batch_size=2)
    if layout == "pipeline":
        config = config.model_copy(update={"dtensor_cfg": DTensorConfig(pipeline_parallel_size=2)})

    def rank_main(rank: int, world: int) -> tuple[int, list[str]]:
        worker = make_worker(model_path, config)
        worker.keep_samples(SampleSettings(folder=tmp_path / "samples", max_tokens=99, decode=str, anchor=0))
        handles, groups = make_groups()
        ones = [[1.0] * NUM_GENERATIONS] * NUM_GROUPS
        ranks = worker.mesh.sizes.data_parallel
        batching = Batching.of(config, quadratic_weight=0.001)
        size = config.train_global_batch_size
        plan = plan_batch(handles, ones, ones, num_ranks=ranks, global_batch_size=size, batching=batching)
        for of_rank in plan.ranks:
            own = {key for batch in of_rank.logprobs for planned in batch for key in planned.keys}
            of_rank.reported = sorted(own & {(0, 0), (0, 3), (1, 0)})
        worker.load(plan.ranks[worker.mesh.data_rank], list(range(NUM_GROUPS)), *groups)
        worker.train(ClippedPGLoss(LOSS), Logprobs())
        kept = len(worker.outputs)
        problem = worker.write_samples(1)
        return kept, [problem] if problem else []

    kept = run_world(rank_main, 2)
    assert sum(number for number, _ in kept) == 3 and all(problems == [] for _, problems in kept)
    samples = [sample for path in sorted((tmp_path / "samples").glob("*.js")) for sample in read_block(path)]
    assert sorted(sample["id"] for sample in samples) == ["0/0", "0/3", "1/0"]
    for sample in samples:
        scored = [value for value, mask in zip(sample["outputs"], sample["mask"], strict=True) if mask == "1"]
        assert scored and all(value < 0 for value in scored) and sample["error"] > 1
