"""Rows on the workers: the inputs of losses and heads, sums and exchange of columns, pairs, and evaluation."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.config.supervised import DPOLossConfig
from nemo_rl.algorithms.losses.distillation import DistillationInputs
from nemo_rl.algorithms.losses.preference import DPOLoss, PreferenceInputs
from nemo_rl.algorithms.losses.value import ValueInputs
from nemo_rl.algorithms.plan.batch import plan_samples
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.models.policy.batch.microbatches import Row, loss_inputs
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.config import DTensorConfig, DynamicBatchingConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
from nemo_rl.models.policy.head.logprobs import LogprobModel
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs
from nemo_rl.types import Example, ExampleGroup, LossInputs, PlannedSample, PolicyGradientInputs, RowKey, TrainResult
from tests.unit.policy.models import VOCAB
from tests.unit.policy.steps import PACKED, make_worker, policy_config, whole_weights
from tests.worlds import run_world

CPU = torch.device("cpu")


# -- what a loss gets


def row(length: int, *, mask: float = 1.0, columns: dict[str, torch.Tensor] | None = None) -> Row:
    ids = torch.arange(length)
    return Row(sample_id="s", token_ids=ids + 5, token_mask=ids > 0, mask=mask, columns=columns or {})


def test_what_every_loss_gets_is_padded_to_the_longest_row():
    inputs = loss_inputs([row(3), row(2, mask=0.0)], LossInputs, CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7], [5, 6, 0]] and inputs.input_ids.dtype == torch.int64
    assert inputs.token_mask.tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    assert inputs.sample_mask.tolist() == [1.0, 0.0]
    assert inputs.token_mask.dtype == inputs.sample_mask.dtype == torch.float32


def test_columns_of_one_number_a_number_per_token_and_several():
    per_sequence = {"reference_logprob_sum": torch.tensor(-3.5), "margin": torch.tensor(0.0)}
    pair = [row(2, columns=per_sequence), row(3, columns=per_sequence)]
    preference = loss_inputs(pair, PreferenceInputs, CPU)
    assert preference.reference_logprob_sum.tolist() == [-3.5, -3.5] and preference.margin.tolist() == [0.0, 0.0]

    per_token = [
        row(2, columns={"values": torch.tensor([1.0, 2.0]), "returns": torch.zeros(2)}),
        row(3, columns={"values": torch.tensor([3.0, 4.0, 5.0]), "returns": torch.ones(3)}),
    ]
    value = loss_inputs(per_token, ValueInputs, CPU)
    assert value.values.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    assert value.returns.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]

    several = [row(n, columns={"teacher_topk": torch.full((n, 4), float(n))}) for n in (3, 1)]
    distillation = loss_inputs(several, DistillationInputs, CPU)
    assert distillation.teacher_topk.shape == (2, 3, 4)
    assert distillation.teacher_topk[:, :, 0].tolist() == [[3.0, 3.0, 3.0], [1.0, 0.0, 0.0]]


def test_a_column_that_was_not_computed_is_refused_where_the_loss_cannot_do_without():
    sampled = [row(2, columns={"advantages": torch.ones(2), "generation_logprobs": torch.ones(2)})]
    assert loss_inputs(sampled, PolicyGradientInputs, CPU).prev_logprobs.tolist() == [[0.0, 0.0]]
    with pytest.raises(AssertionError, match="values was not computed"):
        loss_inputs([row(2, columns={"returns": torch.zeros(2)})], ValueInputs, CPU)
    with pytest.raises(AssertionError, match="some rows have no values"):
        loss_inputs([row(2, columns={"values": torch.zeros(2)}), row(2)], ValueInputs, CPU)


# -- pairs, over every layout


NUM_PAIRS, PAIRS_PER_GROUP = 12, 4


def make_pairs() -> tuple[list[PlannedSample], list[ExampleGroup]]:
    """12 pairs in 3 groups, one of them masked. The first 3 tokens of a sequence carry no loss."""
    generator = np.random.default_rng(0)
    planned: list[PlannedSample] = []
    groups: list[ExampleGroup] = [ExampleGroup(samples=[]) for _ in range(NUM_PAIRS // PAIRS_PER_GROUP)]
    for number in range(NUM_PAIRS):
        group = number // PAIRS_PER_GROUP
        lengths = tuple(int(n) for n in generator.integers(4, 20, 2))
        samples, mask = groups[group].samples, 0.0 if number == 5 else 1.0
        planned.append(PlannedSample(group=group, index=len(samples), lengths=lengths, advantage=0.0, mask=mask))
        for side, length in zip(("chosen", "rejected"), lengths, strict=True):
            ids = generator.integers(2, VOCAB, length).astype(np.int32)
            samples.append(Example(sample_id=f"d:{number}/{side}", token_ids=ids, token_mask=np.arange(length) >= 3))
    return planned, groups


def pair_config(**changes: Any) -> PolicyConfig:
    return policy_config(**{"train_global_batch_size": NUM_PAIRS, "train_micro_batch_size": 5, **changes})


def load_pairs(worker: DTensorPolicyWorker, config: PolicyConfig) -> None:
    planned, groups = make_pairs()
    plan = plan_samples(
        [[pair] for pair in planned],
        list(range(len(groups))),
        num_ranks=worker.mesh.sizes.data_parallel,
        global_batch_size=config.train_global_batch_size,
        batching=Batching.of(config, quadratic_weight=0.001, sequences_per_sample=2),
    )
    worker.load(plan.ranks[worker.mesh.data_rank], {n: (0, n) for n in range(len(groups))}, groups)


class Seen(NamedTuple):
    """Results of one optimizer step on pairs on one rank."""

    reference_sums: dict[RowKey, float]
    before: dict[str, float]
    trained: TrainResult
    after: dict[str, float]


def step_on_pairs(rank: int, world: int, path: Path, config: PolicyConfig) -> Seen:
    worker = make_worker(path, config)
    load_pairs(worker, config)
    worker.compute_reference_logprobs()
    sums = worker.sum_column("reference_policy_logprobs", "reference_logprob_sum")
    loss_fn = DPOLoss(DPOLossConfig(reference_policy_kl_penalty=0.5, sft_average_log_probs=False))
    weights = whole_weights(worker)
    before = worker.evaluate(loss_fn, Logprobs())
    assert all(torch.equal(weight, weights[name]) for name, weight in whole_weights(worker).items())
    assert all(p.grad is None for stage in worker.stages for p in stage.parameters())
    return Seen(sums, before, worker.train(loss_fn, Logprobs()), worker.evaluate(loss_fn, Logprobs()))


def assert_same_metrics(got: dict[str, float], want: dict[str, float], *left_out: str) -> None:
    assert got.keys() == want.keys()
    for name in want.keys() - set(left_out):
        assert got[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name


SIZES = {"train_mb_tokens": 96, "logprob_mb_tokens": 128, "sequence_length_round": 8}
DYNAMIC = {"padding_free": False, "dynamic_batching": DynamicBatchingConfig(enabled=True, **SIZES)}
PAIR_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 dynamic": (2, DYNAMIC),
    "cp packed": (2, PACKED | {"dtensor_cfg": DTensorConfig(context_parallel_size=2)}),
    "pp packed": (2, PACKED | {"dtensor_cfg": DTensorConfig(pipeline_parallel_size=2)}),
}


@pytest.fixture(scope="module")
def alone(llama: Path) -> Seen:
    """One rank, one micro-batch: nothing was split."""
    config = pair_config(train_micro_batch_size=NUM_PAIRS, logprob_batch_size=NUM_PAIRS, padding_free=False)
    seen = run_world(step_on_pairs, 1, llama, config)[0]
    assert seen.before["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert seen.before["global_valid_seqs"] == 2 * (NUM_PAIRS - 1), "sequences; one pair is masked"
    assert seen.after["loss"] < seen.before["loss"] - 1e-3
    return seen


@pytest.mark.parametrize("layout", PAIR_LAYOUTS)
def test_a_step_on_pairs_does_not_depend_on_the_layout_and_evaluation_is_that_of_training(llama, alone, layout):
    world, changes = PAIR_LAYOUTS[layout]
    ranks = run_world(step_on_pairs, world, llama, pair_config(**changes))
    for seen in ranks:
        assert_same_metrics(seen.before, seen.trained.metrics)
        # Policy and reference are equal at first: which answer is the better one is a matter of rounding.
        assert_same_metrics(seen.before, alone.before, "accuracy")
        assert_same_metrics(seen.after, alone.after)
        assert seen.trained.grad_norms == pytest.approx(alone.trained.grad_norms, rel=1e-5)
    reported = [key for seen in ranks for key in seen.reference_sums]
    assert len(reported) == len(set(reported)) == 2 * NUM_PAIRS, "every row by one rank"
    together = {key: value for seen in ranks for key, value in seen.reference_sums.items()}
    assert together == pytest.approx(alone.reference_sums, abs=1e-5)


# -- columns


class WithColumn(HeadTask):
    """Each token's logprob, and what its row's column `extra` says of it."""

    num_values = 2
    columns = ("extra",)

    def __call__(self, model: LogprobModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        return torch.stack([Logprobs()(model, states, batch), batch.columns["extra"]], dim=-1)


@pytest.mark.parametrize("layout", PAIR_LAYOUTS)
def test_columns_reach_the_heads_that_name_them_are_summed_and_copied_in(llama: Path, layout: str):
    world, changes = PAIR_LAYOUTS[layout]

    def rank_main(rank: int, world: int) -> None:
        config = pair_config(**changes)
        worker = make_worker(llama, config)
        load_pairs(worker, config)
        for (group, index), row in worker.rows.items():
            row.columns["extra"] = 100.0 * (10 * group + index) + torch.arange(len(row.token_ids))
            row.columns["x"] = torch.ones(len(row.token_ids))
            row.columns["x"][:3] = 7.0  # of the prompt
            row.columns["x"][3] = 2.0**24  # float32 cannot add 1 to it
        worker.compute(WithColumn(), "both")
        worker.compute(Logprobs(), "prev_logprobs")
        sums = worker.sum_column("x", "total")
        for key, row in worker.rows.items():
            both = row.columns["both"]
            assert both.shape == (len(row.token_ids), 2)
            assert torch.equal(both[:, 0], row.columns["prev_logprobs"])
            assert torch.equal(both[:, 1], row.columns["extra"] * row.token_mask)
            total = float(np.float32(2.0**24 + len(row.token_ids) - 4))
            assert row.columns["total"].item() == total and sums.get(key, total) == total

        keys = list(reversed(worker.rows))
        shared = [np.full((len(worker.rows[key].token_ids), 3), 10 * key[0] + key[1], dtype=np.float32) for key in keys]
        for values in shared:
            values.flags.writeable = False  # as the object store gives them
        worker.attach("teacher_topk", keys, *shared)
        for key, values in zip(keys, shared, strict=True):
            own = worker.rows[key].columns["teacher_topk"]
            assert np.array_equal(own.numpy(), values)
            own += 1.0
            assert not np.array_equal(own.numpy(), values), "a copy"

    run_world(rank_main, world)
