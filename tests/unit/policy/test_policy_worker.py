"""A step of a policy worker: precisions, losses that are not finite, masks, rows of the report, and a CUDA device."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.batch.samples import SampleSettings
from nemo_rl.models.policy.config import DTensorConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_rl.models.policy.dtensor.model import exported_of, trainable
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer
from nemo_rl.models.policy.head.tasks import Logprobs, LogprobsTwice
from nemo_rl.models.policy.pretrained import DTYPES, read_model_config
from nemo_rl.models.policy.settings import WHOLE_GRADIENT_SHARE
from nemo_rl.report.run_files import read_block
from nemo_rl.types import LossInputs, LossMetrics, TrainResult
from tests.unit.policy import steps
from tests.unit.policy.test_pipeline import counted_collectives
from tests.worlds import in_new_process, run_world


def test_mixed_and_pure_bfloat16_train_like_float32_to_their_precision(qwen: Path) -> None:
    precisions = ("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")
    configs = [steps.policy_config(precision=p, master_precision=m, train_micro_batch_size=4) for p, m in precisions]
    exact, *rounded = run_world(lambda rank, world: [steps.one_step(rank, world, qwen, c) for c in configs], 2)[0]
    for step, master, apart in zip(rounded, ("float32", "bfloat16"), (0.01, 0.02), strict=True):
        assert step.result.losses == pytest.approx(exact.result.losses, rel=0.1, abs=0.02)
        assert step.result.grad_norms == pytest.approx(exact.result.grad_norms, rel=0.1)
        assert {weight.dtype for weight in step.weights.values()} == {DTYPES[master]}
        for name, weight in step.weights.items():
            # One part in 128 is what bfloat16 rounds away; float32 master weights keep what a small step adds.
            assert (weight.float() - exact.weights[name]).abs().max() < apart, name


class NotingLoss(ClippedPGLoss):
    """Notes for each micro-batch whether its outputs have a gradient."""

    def __init__(self, cfg: ClippedPGLossConfig) -> None:
        super().__init__(cfg)
        self.had_gradient: list[bool] = []

    def __call__(self, outputs: torch.Tensor, *others: Any) -> tuple[torch.Tensor, LossMetrics]:
        self.had_gradient.append(outputs.requires_grad)
        return super().__call__(outputs, *others)


def _half_of_the_groups_teach(
    rank: int, world: int, path: Path, config: PolicyConfig, only_advantages_teach: bool
) -> tuple[TrainResult, dict[str, torch.Tensor], list[bool]]:
    """Result, weights and notes of a step."""
    worker = steps.make_worker(path, config)
    advantages = [[float(g % 2) * a for a in own] for g, own in enumerate(steps.ADVANTAGES)]
    steps.load_step(worker, advantages=advantages, only_advantages_teach=only_advantages_teach)
    worker.compute(Logprobs(), "prev_logprobs")
    loss = NotingLoss(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    return worker.train(loss, Logprobs()), steps.whole_weights(worker), loss.had_gradient


PIPELINE = DTensorConfig(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "config",
    [
        steps.policy_config(**steps.PACKED),
        steps.policy_config(train_micro_batch_size=1, dtensor_cfg=DTensorConfig(defer_fsdp_grad_sync=False)),
        steps.policy_config(train_micro_batch_size=2, dtensor_cfg=PIPELINE),
        steps.megatron_policy({"train_micro_batch_size": 2}, pipeline_model_parallel_size=2),
        steps.megatron_policy(steps.PACKED),
    ],
    ids=["packed", "sharded-gradients", "pipeline", "megatron-pipeline", "megatron-packed"],
)
def test_rows_that_teach_nothing_have_no_backward_pass_and_count_in_the_metrics(
    config: PolicyConfig, llama: Path
) -> None:
    whole, halves = (run_world(_half_of_the_groups_teach, 2, llama, config, is_known) for is_known in (False, True))
    for (result, weights, had_gradient), (same_result, same_weights, some_had) in zip(whole, halves, strict=True):
        assert all(had_gradient) and False in some_had
        for name, weight in same_weights.items():
            assert (weight - weights[name]).abs().max() < 1e-6, name
        assert same_result.metrics == pytest.approx(result.metrics, rel=1e-5, abs=1e-7)
        assert same_result.grad_norms == pytest.approx(result.grad_norms, rel=1e-5)


def test_ranks_decide_together_when_gradients_are_reduced(qwen: Path) -> None:
    """Two ranks cannot share 97 embeddings evenly: twice the part of one is more than the limit, of the other less."""

    def deferred(rank: int, world: int) -> bool:
        config = steps.policy_config()
        count = sum(parameter.numel() for parameter in trainable(steps.make_worker(qwen, config).stages))
        memory = WHOLE_GRADIENT_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        worker = steps.make_worker(qwen, config, workers_per_node=int(memory / (4 * count)))
        return worker.runner.keeps_whole

    assert run_world(deferred, 2) == [False, False]


def test_a_step_gathers_weights_once_where_gradients_stay_whole(qwen: Path) -> None:
    """Logprobs and two optimizer steps gather two layers and the rest; the first step finds the rest gathered."""

    def gathers(rank: int, world: int) -> list[int]:
        counts = []
        for is_deferred in (True, False):
            config = steps.policy_config(dtensor_cfg=DTensorConfig(defer_fsdp_grad_sync=is_deferred))
            worker = steps.make_worker(qwen, config, init_reference_model=False)
            steps.load_step(worker)
            with counted_collectives() as calls:
                worker.compute(Logprobs(), "prev_logprobs")
                worker.train(
                    ClippedPGLoss(steps.LOSS.model_copy(update={"reference_policy_kl_penalty": 0.0})), Logprobs()
                )
            counts.append(calls["gather_rows"])
        return counts

    assert run_world(gathers, 2)[0] == [3 * 3 - 1, 16]


def test_small_weights_travel_together_and_adam_moves_them_together(qwen: Path) -> None:
    """What is gathered is what each rank's rows are at that time, and the optimizer step that of each parameter."""

    def rank_main(rank: int, world: int) -> None:
        alone, shared = (AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32) for _ in range(2))
        fully_shard(shared)
        reference = torch.optim.AdamW(alone.parameters(), lr=0.1, foreach=False)
        config = steps.policy_config(optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 0.1}))
        optimizer, exported = build_optimizer(config, shared.parameters()), list(exported_of(shared))
        assert optimizer.param_groups[0]["foreach"]
        for _ in range(3):
            alone(torch.arange(2, 26).view(2, 12)).logits.square().mean().backward()
            for mine, whole in zip(shared.parameters(), alone.parameters(), strict=True):
                mine.grad = distribute_tensor(whole.grad, mine.device_mesh, mine.placements)
            for step in (reference, optimizer):
                step.step()
                step.zero_grad()
            expected = alone.state_dict()
            assert all(torch.equal(tensor.gather(None), expected[tensor.name]) for tensor in exported)

    run_world(rank_main, 2)


# -- losses that are not finite


class NanLoss:
    """Not finite for samples with token 7 anywhere, or in every micro-batch of `rank`."""

    inputs_type = LossInputs

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def __call__(self, logprobs: torch.Tensor, inputs: LossInputs, seqs: torch.Tensor, toks: torch.Tensor) -> Any:
        is_bad = (inputs.input_ids == 7).any() if self.rank is None else dist.get_rank() == self.rank
        return logprobs.sum() / toks + (float("nan") if is_bad else 0.0), {}


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_ranks_after_the_same_step(qwen: Path) -> None:
    def rank_main(rank: int, world: int) -> TrainResult:
        config = steps.policy_config(nonfinite_action="stop", train_micro_batch_size=1, train_global_batch_size=4)
        worker = steps.make_worker(qwen, config)
        steps.load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        return worker.train(NanLoss(rank=0), Logprobs())

    first, second = run_world(rank_main, 2)
    assert len(first.losses) == len(second.losses) == 1, "of four optimizer steps"
    assert len(first.nonfinite_samples) == 2 and second.nonfinite_samples == []


@pytest.mark.parametrize(
    "layout", [None, "data", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor", "pipeline"))]
)
def test_a_loss_that_is_not_finite_leaves_no_trace_and_names_its_samples(qwen: Path, layout: str | None) -> None:
    """Of Megatron with `layout`, of PyTorch without."""
    changes = {"nonfinite_action": "skip", "train_micro_batch_size": 1, "train_global_batch_size": 16}
    if layout is None:
        config = steps.policy_config(**changes, optimizer=OptimizerConfig(kwargs={"lr": 1e-3}))
    else:
        cut = {} if layout == "data" else {f"{layout}_model_parallel_size": 2}
        adam = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}
        config = steps.megatron_policy(changes, optimizer=adam, **cut)

    def rank_main(rank: int, world: int) -> TrainResult:
        after = []
        for comes_nan in (False, True):
            worker = steps.make_worker(qwen, config)
            steps.load_step(worker)
            if comes_nan:
                before = steps.whole_weights(worker)
                worker.compute_reference_logprobs()
                result = worker.train(NanLoss(), Logprobs())
                assert all(torch.equal(tensor, before[name]) for name, tensor in steps.whole_weights(worker).items())
            steps.train_step(worker)
            after.append(steps.whole_weights(worker))
            if layout is not None:
                worker.mesh.close()
        assert all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items()), "nor in the next step"
        return result

    results = run_world(rank_main, 2)
    guilty = {s.meta.sample_id for group in steps.make_groups()[1] for s in group.samples if (s.token_ids == 7).any()}
    assert 0 < len(guilty) < 16
    assert {name for result in results for name in result.nonfinite_samples} == guilty
    assert [result.num_skipped_steps for result in results] == [1, 1]


def test_a_scheduler_of_training_steps_waits_for_the_last_pass(qwen: Path) -> None:
    schedule = [SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.5})]
    how = {"scheduler_step_per": "train_call", "train_global_batch_size": 16, "scheduler": schedule}

    def rank_main(rank: int, world: int) -> list[float]:
        worker = steps.make_worker(qwen, steps.policy_config(**how))
        steps.load_step(worker)
        passes = [worker.train(ClippedPGLoss(steps.LOSS), Logprobs(), is_last) for is_last in (False, True, True)]
        return [result.learning_rates[0] / passes[0].learning_rates[0] for result in passes]

    assert run_world(rank_main, 1)[0] == pytest.approx([1.0, 1.0, 1.2])


def test_samples_whose_logprobs_disagree_are_masked_and_counted(qwen: Path) -> None:
    def rank_main(rank: int, world: int) -> tuple[dict[str, float], list[str]]:
        worker = steps.make_worker(qwen, steps.policy_config())
        steps.load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        for row in worker.rows.values():
            off = 2.0 if row.sample_id == "0/1" else 0.01
            row.columns["generation_logprobs"] = row.columns["prev_logprobs"] + off * row.token_mask
        report = worker.mask_sequences_by_importance(1.5)
        return report, [row.sample_id for row in worker.rows.values() if row.mask == 0.0]

    (report, masked), (other, more) = run_world(rank_main, 2)
    assert report == other and report["num_masked_seqs_by_logprob_error"] == 1
    assert report["max_seq_mult_prob_error"] == pytest.approx(math.exp(2.0), rel=1e-5)
    assert sorted(masked + more) == ["0/1", "1/2"]  # 1/2 failed in its episode


def test_reported_rows_are_written_by_the_rank_that_has_their_outputs(qwen, tmp_path):
    """Once each, with the logprobs of the training pass itself; and rows that are not reported are not kept."""

    def written(stages: int) -> tuple[int, str | None]:
        cut = DTensorConfig(pipeline_parallel_size=stages)
        config = steps.policy_config(train_global_batch_size=16, train_micro_batch_size=2, dtensor_cfg=cut)
        worker, folder = steps.make_worker(qwen, config), tmp_path / f"stages_{stages}"
        worker.keep_samples(SampleSettings(folder=folder, max_tokens=99, decode=str, anchor=0))
        steps.load_step(worker, reported={(0, 0), (0, 3), (1, 0)})
        worker.train(ClippedPGLoss(steps.LOSS), Logprobs())
        return len(worker.outputs), worker.write_samples(1)

    ranks = run_world(lambda rank, world: [written(stages) for stages in (1, 2)], 2)
    for stages, kept in zip((1, 2), zip(*ranks, strict=True), strict=True):
        assert sum(number for number, _ in kept) == 3 and not any(problem for _, problem in kept)
        samples = [sample for path in sorted(tmp_path.glob(f"stages_{stages}/*.js")) for sample in read_block(path)]
        assert sorted(sample["id"] for sample in samples) == ["0/0", "0/3", "1/0"]
        for sample in samples:
            scored = [value for value, mask in zip(sample["outputs"], sample["mask"], strict=True) if mask == "1"]
            assert scored and all(value < 0 for value in scored) and sample["error"] > 1


def test_an_optimizer_or_argument_that_does_not_exist_is_refused_by_key():
    for name, kwargs, message in (
        ("torch.optim.SGD", {"rate": 1.0}, r"policy\.optimizer\.kwargs: SGD does not take rate; it takes: lr"),
        ("torch.nn.Linear", {}, r"is not a torch\.optim\.optimizer\.Optimizer"),
    ):
        config = steps.policy_config(optimizer=OptimizerConfig(name=name, kwargs=kwargs))
        with pytest.raises(ValueError, match=message):
            build_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])


# -- on a CUDA device, against the worker on the CPU


def two_steps(path: Path, use_gpu: bool, changes: dict[str, Any]) -> list[TrainResult]:
    config = steps.policy_config(train_micro_batch_size=2, **steps.PACKED, **changes)
    worker = steps.make_worker(path, config, use_gpu=use_gpu, workers_per_node=1)
    results = []
    for _ in range(2):
        steps.load_step(worker)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        if use_gpu:
            torch.cuda.set_sync_debug_mode("error")  # the micro-batch loop waits for the device nowhere
            batches = worker._model_batches([list(worker.rows.values())[:2]] * 3, Logprobs())
            worker.runner.train(batches, lambda number, logprobs: logprobs.sum() * 0.0, Logprobs())
            torch.cuda.set_sync_debug_mode("default")
        results.append(worker.train(ClippedPGLoss(steps.LOSS), Logprobs()))
        if use_gpu:
            worker.offload()
            free = torch.cuda.memory_allocated()
            worker.onload(with_optimizer=True)
            assert free < torch.cuda.memory_allocated() or config.dtensor_cfg.cpu_offload
    return results


def steps_on(path: Path, *, use_gpu: bool, **changes: Any) -> list[TrainResult]:
    return in_new_process(two_steps, path, use_gpu, changes, backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo")


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"precision": "bfloat16"}, 0.1),
        ({"dtensor_cfg": DTensorConfig(cpu_offload=True)}, 1e-4),
        ({"dtensor_cfg": DTensorConfig(activation_checkpointing="selective")}, 1e-4),
        ({"dtensor_cfg": DTensorConfig(torch_compile=True)}, 1e-4),
    ],
    ids=["float32", "bfloat16", "state on the host", "recomputed", "compiled"],
)
@pytest.mark.gpu
def test_a_step_on_the_device_is_the_step_on_the_host(llama: Path, changes: dict[str, Any], tolerance: float):
    on_host = steps_on(llama, use_gpu=False)
    on_device = steps_on(llama, use_gpu=True, **changes)
    for want, got in zip(on_host, on_device, strict=True):
        assert got.losses == pytest.approx(want.losses, rel=tolerance, abs=tolerance)
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=tolerance)


@pytest.mark.gpu
def test_two_deterministic_runs_are_bitwise_equal(llama: Path) -> None:
    first = steps_on(llama, use_gpu=True, deterministic=True, precision="bfloat16")
    second = steps_on(llama, use_gpu=True, deterministic=True, precision="bfloat16")
    assert first == second


def test_parts_that_a_model_of_text_has_not_may_be_frozen(qwen: Path, caplog) -> None:
    config = steps.policy_config(model_name=str(qwen), freeze=["vision_tower", "projector"])
    assert read_model_config(config, str(qwen)).model_type.startswith("qwen")
    assert "sees no images and has no such parts" in caplog.text

    def is_trained(rank: int, world: int) -> bool:
        return all(p.requires_grad for stage in steps.make_worker(qwen, config).stages for p in stage.parameters())

    assert run_world(is_trained, 1) == [True]
    with pytest.raises(ValueError, match=r"sees no images, so nothing would be trained; leave language_model out"):
        read_model_config(steps.policy_config(model_name=str(qwen), freeze=["language_model"]), str(qwen))


def test_the_likelihood_of_good_samples_is_a_mean_over_all_ranks(qwen: Path) -> None:
    def rank_main(rank: int, world: int) -> tuple[float, float, int]:
        worker = steps.make_worker(qwen, steps.policy_config(train_global_batch_size=16, train_micro_batch_size=2))
        good = [[(group + index) % 3 == 0 for index in range(4)] for group in range(4)]
        steps.load_step(worker, good=good)
        worker.compute(Logprobs(), "prev_logprobs")
        worker.compute_reference_logprobs()
        rows = [row for (group, index), row in worker.rows.items() if row.mask > 0 and good[group][index]]
        own = [-row.columns["prev_logprobs"][row.token_mask] for row in rows]
        loss = ClippedPGLoss(steps.LOSS.model_copy(update={"positive_example_nll_weight": 0.1}))
        metrics = worker.train(loss, Logprobs()).metrics
        return metrics["positive_example_nll"], sum(float(part.sum()) for part in own), sum(map(len, own))

    ranks = run_world(rank_main, 2)
    mean = sum(total for _, total, _ in ranks) / sum(number for *_, number in ranks)
    assert [found for found, *_ in ranks] == pytest.approx([mean] * 2, rel=1e-5)


def test_logprobs_with_and_without_filters_in_one_pass(qwen: Path) -> None:
    def rank_main(rank: int, world: int) -> dict[str, Any]:
        sampling = replace(steps.worker_settings(qwen).sampling, top_k=3)
        worker = steps.make_worker(qwen, steps.policy_config(train_global_batch_size=16), sampling=sampling)
        steps.load_step(worker)
        for column, task in (("kept", Logprobs()), ("all", Logprobs(filtered=False)), ("both", LogprobsTwice())):
            worker.compute(task, column)
        for row in worker.rows.values():
            assert torch.equal(row.columns["both"], torch.stack([row.columns["kept"], row.columns["all"]], dim=-1))
            row.columns["reference_policy_logprobs"] = row.columns["all"] - 0.5 * row.token_mask
        loss = steps.LOSS.model_copy(update={"reference_policy_kl_type": "k1"})
        return worker.train(ClippedPGLoss(loss), LogprobsTwice()).metrics

    [metrics] = run_world(rank_main, 1)
    assert metrics["kl_penalty"] == pytest.approx(0.5), "the KL is of the logprobs without filters"
    assert metrics["probs_ratio"] == pytest.approx(1.0), "and the ratio of those with"
