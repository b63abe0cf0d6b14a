"""Rows on the workers: where tokens lie, inputs of losses and heads, columns, pairs and evaluation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.supervised import DPOLossConfig
from nemo_rl.algorithms.losses.distillation import DistillationInputs
from nemo_rl.algorithms.losses.preference import DPOLoss
from nemo_rl.algorithms.losses.value import ValueInputs
from nemo_rl.algorithms.plan.batch import plan_samples
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.models.policy.batch.microbatches import LoadedRow, loss_inputs
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.config import DTensorConfig, DynamicBatchingConfig, PolicyConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import Example, ExampleGroup, PlannedSample, PolicyGradientInputs
from tests.unit.policy.models import VOCAB
from tests.unit.policy.steps import PACKED, Worker, make_worker, policy_config, whole_weights
from tests.worlds import run_world

CPU = torch.device("cpu")


def row(length: int, *, mask: float = 1.0, columns: dict[str, torch.Tensor] | None = None) -> LoadedRow:
    ids = torch.arange(length)
    return LoadedRow(sample_id="s", token_ids=ids + 5, token_mask=ids > 0, mask=mask, columns=columns or {})


def test_what_a_loss_gets_is_padded_and_a_column_it_cannot_do_without_is_refused():
    """tests/parity has pairs and rewards."""
    long, short = ({name: torch.ones(n) for name in ("advantages", "generation_logprobs")} for n in (3, 2))
    inputs = loss_inputs([row(3, columns=long), row(2, mask=0.0, columns=short)], PolicyGradientInputs, CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7], [5, 6, 0]]
    assert inputs.token_mask.tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    assert inputs.sample_mask.tolist() == [1.0, 0.0] and inputs.token_mask.dtype == torch.float32
    assert inputs.advantages.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    assert inputs.prev_logprobs.tolist() == [[0.0] * 3] * 2, "may be left out"
    wide = [row(n, columns={"teacher_topk": torch.ones(n, 2)}) for n in (3, 2)]
    assert loss_inputs(wide, DistillationInputs, CPU).teacher_topk.sum(dim=-1).tolist() == [[2.0] * 3, [2.0, 2.0, 0.0]]
    with pytest.raises(ValueError, match=r"no row has the column 'values' that the loss needs \(ValueInputs\)"):
        loss_inputs([row(2, columns={"returns": torch.zeros(2)})], ValueInputs, CPU)
    with pytest.raises(AssertionError, match="some rows have no values"):
        loss_inputs([row(2, columns={"values": torch.zeros(2)}), row(2)], ValueInputs, CPU)


# -- pairs, over every layout


NUM_PAIRS, PAIRS_PER_GROUP = 12, 4


def load_pairs(worker: Worker) -> None:
    """12 pairs in 3 groups, one of them masked. The first 3 tokens of a sequence carry no loss."""
    generator = np.random.default_rng(0)
    planned, groups = [], [ExampleGroup(samples=[]) for _ in range(NUM_PAIRS // PAIRS_PER_GROUP)]
    for number in range(NUM_PAIRS):
        group, lengths = number // PAIRS_PER_GROUP, tuple(int(n) for n in generator.integers(4, 20, 2))
        samples, mask = groups[group].samples, float(number != 5)
        planned.append(PlannedSample(group=group, index=len(samples), lengths=lengths, advantage=0.0, mask=mask))
        for side, length in zip(("chosen", "rejected"), lengths, strict=True):
            ids = generator.integers(2, VOCAB, length).astype(np.int32)
            samples.append(Example(sample_id=f"d:{number}/{side}", token_ids=ids, token_mask=np.arange(length) >= 3))
    plan = plan_samples(
        [[pair] for pair in planned],
        list(range(len(groups))),
        num_ranks=worker.mesh.sizes.data_parallel,
        global_batch_size=worker.config.train_global_batch_size,
        batching=Batching.of(worker.config, quadratic_weight=0.001, sequences_per_sample=2),
    )
    worker.load(plan.ranks[worker.mesh.data_rank], {n: (0, n) for n in range(len(groups))}, groups)


def check_columns(worker: Worker) -> None:
    """They are summed over scored tokens, and copied in. test_head_tasks_distillation.py has heads with them."""
    load_pairs(worker)
    for row in worker.rows.values():
        row.columns["x"] = torch.ones(len(row.token_ids))
        row.columns["x"][:3] = 7.0  # of the prompt
        row.columns["x"][3] = 2.0**24  # float32 cannot add 1 to it
    sums = worker.sum_column("x", "total")
    for key, row in worker.rows.items():
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


def step_on_pairs(rank: int, world: int, path: Path, config: PolicyConfig) -> tuple[Any, ...]:
    """Sums of the reference, and results of an optimizer step between two evaluations."""
    worker = make_worker(path, config)
    load_pairs(worker)
    worker.compute_reference_logprobs()
    sums = worker.sum_column("reference_policy_logprobs", "reference_logprob_sum")
    loss_fn = DPOLoss(DPOLossConfig(reference_policy_kl_penalty=0.5, sft_average_log_probs=False))
    weights = whole_weights(worker)
    before = worker.evaluate(loss_fn, Logprobs())
    assert all(torch.equal(weight, weights[name]) for name, weight in whole_weights(worker).items())
    assert all(p.grad is None for stage in worker.stages for p in stage.parameters())
    trained, after = worker.train(loss_fn, Logprobs()), worker.evaluate(loss_fn, Logprobs())
    check_columns(worker)
    return sums, before, trained, after


SIZES = {"train_mb_tokens": 96, "logprob_mb_tokens": 128, "sequence_length_round": 8}
PAIR_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 dynamic": {"padding_free": False, "dynamic_batching": DynamicBatchingConfig(enabled=True, **SIZES)},
    "cp packed": PACKED | {"dtensor_cfg": DTensorConfig(context_parallel_size=2)},
    "pp packed": PACKED | {"dtensor_cfg": DTensorConfig(pipeline_parallel_size=2)},
}


@pytest.fixture(scope="module")
def alone(llama: Path) -> tuple[Any, ...]:
    """One rank, one micro-batch: nothing was split."""
    whole = dict.fromkeys(("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size"), NUM_PAIRS)
    config = policy_config(**whole, padding_free=False)
    [(sums, before, trained, after)] = run_world(step_on_pairs, 1, llama, config)
    assert before["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["global_valid_seqs"] == 2 * (NUM_PAIRS - 1), "sequences; one pair is masked"
    assert after["loss"] < before["loss"] - 1e-3
    return sums, before, trained, after


@pytest.mark.parametrize("layout", PAIR_LAYOUTS)
def test_a_step_on_pairs_and_its_columns_do_not_depend_on_the_layout_nor_does_evaluation(llama, alone, layout):
    config = policy_config(train_global_batch_size=NUM_PAIRS, train_micro_batch_size=5, **PAIR_LAYOUTS[layout])
    ranks, near = run_world(step_on_pairs, 2, llama, config), {"rel": 1e-6, "abs": 1e-6}
    want_sums, first, step, last = alone
    for _, before, trained, after in ranks:
        assert before == pytest.approx(trained.metrics, **near)
        # Policy and reference are equal at first: which answer is the better one is a matter of rounding.
        assert before == pytest.approx(first | {"accuracy": before["accuracy"]}, **near)
        assert after == pytest.approx(last, **near)
        assert trained.grad_norms == pytest.approx(step.grad_norms, rel=1e-5)
    reported = [item for sums, *_ in ranks for item in sums.items()]
    assert len(reported) == 2 * NUM_PAIRS, "every row by one rank"
    assert dict(reported) == pytest.approx(want_sums, abs=1e-5)


# -- where tokens lie in a micro-batch: none lost, none twice, every scored token beside the state that predicts it;
# test_attention.py has prompts that sequences share


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    padding_free=st.booleans(),
    divisible_by=st.sampled_from([1, 2, 3, 8]),
    size=st.sampled_from([1, 2, 3, 4]),
    own_states=st.booleans(),
    data=st.data(),
)
def test_every_scored_token_is_judged_once_by_the_state_before_it_or_by_its_own(
    lengths, padding_free, divisible_by, size, own_states, data
):
    masks = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in lengths]
    # An id says where the token stands.
    sequences = [(1000 * (i + 1) + torch.arange(n), masks[i]) for i, n in enumerate(lengths)]
    how = {"padding_free": padding_free, "divisible_by": divisible_by, "own_states": own_states, "context_size": size}
    groups = [dist.ProcessGroup(rank, size) if size > 1 else None for rank in range(size)]
    layouts = [RowLayout(**how, context_rank=rank, context_group=group) for rank, group in enumerate(groups)]
    columns = {"of each": [torch.stack([ids, -ids], dim=1) for ids, _ in sequences]}
    batches = [layout.build(sequences, columns) for layout in layouts]

    seen = []
    for batch in batches:
        assert batch.input_ids.shape == (1 if padding_free else len(lengths), layouts[0].width(lengths))
        assert batch.shape == (len(lengths), max(lengths))
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        is_token = ids > 0
        assert (positions[is_token] == ids[is_token] % 1000).all()
        assert (batch.targets == 1000 * (batch.rows + 1) + batch.positions).all()
        assert (ids[batch.states] == batch.targets - (0 if own_states else 1)).all()
        assert (batch.columns["of each"] == torch.stack([batch.targets, -batch.targets], dim=1)).all()
        seen += list(zip(batch.rows.tolist(), batch.positions.tolist(), strict=True))
    expected = [(i, j) for i, mask in enumerate(masks) for j in range(0 if own_states else 1, lengths[i]) if mask[j]]
    assert sorted(seen) == expected
    tokens = torch.cat([batch.input_ids.flatten() for batch in batches])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(torch.cat([ids for ids, _ in sequences]).tolist())

    for batch in batches:
        if size > 1 or padding_free:
            check_keys(batch, tokens)
        else:
            assert batch.cu_seqlens is None
    # An early and a late chunk of every sequence on each rank are the same work.
    assert size == 1 or len({sum(batch.cu_seqlens.key_lengths) for batch in batches}) == 1


def check_keys(batch: ModelBatch, tokens: torch.Tensor) -> None:
    """Every segment's keys are its sequence from the start up to its own last query; padding has its own segment."""
    segments = batch.cu_seqlens
    assert segments is not None and segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    keys = tokens if segments.key_index is None else tokens[segments.key_index]
    queries, at = (own.flatten().split(segments.query_lengths) for own in (batch.input_ids, batch.position_ids))
    for query, key, position in zip(queries, keys.split(segments.key_lengths), at, strict=True):
        assert len(query) and torch.equal(query, key[-len(query) :])
        assert torch.equal(position, torch.arange(len(key) - len(query), len(key)))
        real = key[key > 0]
        assert not len(real) or (key[0] % 1000 == 0 and torch.equal(real, key[0] + torch.arange(len(real))))
        assert not key[len(real) :].any()
