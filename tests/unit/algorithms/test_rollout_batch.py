import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.plan.batch import plan_batch, plan_samples
from nemo_rl.algorithms.plan.micro_batches import Batching, FixedSize, PackedTokens, PaddedTokens
from nemo_rl.algorithms.trainers.metrics import measure_packing
from nemo_rl.config.rules import round_up
from nemo_rl.distributed.packing import PackingAlgorithm
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.types import BatchPlan, MicroBatch, PlannedSample
from tests.fakes import handle, sample
from tests.tables import named
from tests.unit.config.run_configs import build

LONGEST = 99


def plan_of(
    lengths: list[int], batching: Batching, group_size: int = 1, silent: Collection[int] = (), **layout: Any
) -> BatchPlan:
    """Groups whose shortest sample has an answer of one token; the advantage of a sample is its number + 1, and 0 for
    those of `silent` groups, which teach nothing."""
    groups, advantages = [], []
    for start in range(0, len(lengths), group_size):
        own = lengths[start : start + group_size]
        prompt = min(own) - 1
        samples = [sample(prompt=prompt, generated=n - prompt) for n in own]
        groups.append(replace(handle(*samples), ref=f"ref{len(groups)}"))
        factor = float(len(advantages) not in silent)
        advantages.append([factor * (start + i + 1) for i in range(len(own))])
    ones = [[1.0] * len(own) for own in advantages]
    return plan_batch(groups, advantages, ones, batching=batching, only_advantages_teach=True, **layout)


def test_good_rows_share_the_likelihood_of_their_optimizer_step():
    groups = [handle(sample(1.0, generated=2), sample(0.0, generated=5)), handle(*[sample(1.0, generated=3)] * 2)]
    ones, good = [[1.0, 1.0], [0.0, 1.0]], [[True, False], [True, True]]  # the third row is masked
    for size, expected in ((2, [1 / 2, 0.0, 0.0, 1 / 3]), (4, [1 / 5, 0.0, 0.0, 1 / 5])):
        plan = plan_batch(groups, ones, ones, good=good, num_ranks=1, global_batch_size=size, batching=fixed(1, 1))
        rows = {(row.group, row.index): row.nll_weight for batch in plan.ranks[0].logprobs for row in batch}
        assert [rows[key] for key in sorted(rows)] == pytest.approx(expected)


def fixed(train: int, logprobs: int) -> Batching:
    return Batching(train=FixedSize(train), logprobs=FixedSize(logprobs), quadratic_weight=0.01)


def padded(train: int, logprobs: int, length_round: int = 1) -> Batching:
    first, second = (PaddedTokens(tokens=tokens, length_round=length_round) for tokens in (train, logprobs))
    return Batching(train=first, logprobs=second, quadratic_weight=0.01)


def packed(train: int, logprobs: int, length_multiple: int = 1, algorithm: str = "first_fit_decreasing") -> Batching:
    rule = partial(PackedTokens, algorithm=PackingAlgorithm(algorithm), length_multiple=length_multiple)
    return Batching(train=rule(tokens=train), logprobs=rule(tokens=logprobs), quadratic_weight=0.01)


def lengths_of(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [[sample.length for sample in batch] for batch in micro_batches]


def batchings(sequences_per_sample: int) -> st.SearchStrategy[Batching]:
    """All ways, with room for a sample of the longest sequences."""
    longest, most = sequences_per_sample * LONGEST, sequences_per_sample * 400
    budgets = st.integers(longest, most), st.integers(longest, most)
    packed_budgets = st.integers(longest + 10, most), st.integers(longest + 10, most)
    multiples, algorithms = st.sampled_from([1, 4]), st.sampled_from([rule.value for rule in PackingAlgorithm])
    return st.one_of(
        st.builds(fixed, st.integers(1, 7), st.integers(1, 7)),
        st.builds(padded, *budgets, st.sampled_from([1, 8, 64])),
        st.builds(packed, *packed_budgets, multiples, algorithms),
    )


def check_room(rule: FixedSize | PaddedTokens | PackedTokens, batch: MicroBatch, *, shares: bool) -> None:
    assert batch, "no dummy work"
    sequences = [length for sample in batch for length in sample.lengths]
    if isinstance(rule, FixedSize):
        assert len(batch) <= rule.samples
    elif isinstance(rule, PaddedTokens):
        most = rule.tokens * len(batch) // len(sequences)  # what a sequence may take where no second sample is
        assert len(sequences) * min(round_up(max(sequences), rule.length_round), most) <= rule.tokens
        assert len(sequences) * max(sequences) <= rule.tokens
    else:
        prompts = {s.group: s.prompt for s in batch} if shares else {}
        saved = sum(s.prompt for s in batch if shares) - sum(prompts.values())
        assert sum(round_up(length, rule.length_multiple) for length in sequences) - saved <= rule.tokens


def check_plan(plan: BatchPlan, samples: list[PlannedSample], batching: Batching, **layout: int) -> None:
    """Every sample on one rank, in its optimizer step, in micro-batches that have room and are equally many."""
    multiple, global_batch = batching.micro_batch_multiple, layout["global_batch_size"]
    order = {sample: number for number, sample in enumerate(samples)}
    trained = [s for rank in plan.ranks for step in rank.train for mb in step for s in mb]
    assert len(plan.ranks) == layout["num_ranks"] and sorted(trained, key=order.__getitem__) == samples
    for rank in plan.ranks:
        assert len(rank.train) == len(samples) // global_batch
        mine = {s for step in rank.train for mb in step for s in mb}
        scored = [s for mb in rank.logprobs for s in mb]
        assert len(scored) == len(mine) and set(scored) == mine
        assert len(rank.logprobs) == len(plan.ranks[0].logprobs) and len(rank.logprobs) % multiple == 0
        for batch in rank.logprobs:
            check_room(batching.logprobs, batch, shares=batching.shares_prompts)
        for number, step in enumerate(rank.train):
            assert len(step) == len(plan.ranks[0].train[number]), "ranks enter the same collectives"
            assert len(step) % multiple == 0 and all(order[s] // global_batch == number for mb in step for s in mb)
            for batch in step:
                check_room(batching.train, batch, shares=batching.shares_prompts)
        assert rank.forward_only == plan.ranks[0].forward_only
        halves = [half for step, n in zip(rank.train, rank.forward_only, strict=True) for half in (step[:n], step[n:])]
        for forward_only, with_backward in zip(halves[::2], halves[1::2], strict=True):
            assert len(forward_only) % multiple == 0 and with_backward
            assert not any(s.teaches for mb in forward_only for s in mb)
        for number in range(len(rank.train)):
            others = [mb for own in plan.ranks for mb in own.train[number][own.forward_only[number] :]]
            num_idle = sum(not s.teaches for mb in others for s in mb)
            assert num_idle <= multiple * len(plan.ranks), "only as many as fill up the others"
        for micro_batches in (*halves, rank.logprobs):
            by_cost = isinstance(batching.train, PackedTokens)
            keys = [batching.cost(mb) if by_cost else max(s.longest for s in mb) for mb in micro_batches]
            in_order = keys == sorted(keys, reverse=True) or (batching.shares_prompts and not by_cost)
            assert in_order, "ranks wait for each other: the costliest first, on all of them"
    metrics = measure_packing(plan, batching).metrics()
    assert metrics.keys() == metric_names.PACKING
    assert 0 < metrics["packing/fill"] <= 1 and 0 <= metrics["packing/padding_fraction"] < 1
    assert metrics["packing/wait_imbalance"] >= metrics["packing/work_imbalance"] - 1e-9 >= 1 - 2e-9


STEPS = {"ranks": st.sampled_from([1, 2, 3, 4]), "per_rank": st.integers(1, 5), "num_steps": st.integers(1, 3)}
GROUPS = {"sequences": st.sampled_from([1, 2]), "group_size": st.sampled_from([1, 3, 4]), "shares": st.booleans()}


@settings(deadline=None, max_examples=200)
@given(**STEPS, multiple=st.sampled_from([1, 1, 2, 4]), **GROUPS, data=st.data())
def test_every_sample_and_every_pair_is_trained_and_scored_exactly_once_on_one_rank(
    ranks, multiple, per_rank, num_steps, sequences, group_size, shares, data
):
    """The sequences of a pair are neighbours in one micro-batch. Pairs share no prompts."""
    layout = {"num_ranks": ranks, "global_batch_size": ranks * multiple * per_rank}
    num = layout["global_batch_size"] * num_steps
    silent = data.draw(st.sets(st.integers(0, (num - 1) // group_size)))
    drawn = st.tuples(*[st.integers(2, LONGEST)] * sequences)
    lengths = data.draw(st.lists(drawn, min_size=num, max_size=num))
    batching = data.draw(batchings(sequences))
    shares &= not (isinstance(batching.train, PackedTokens) and batching.train.length_multiple > 1) and sequences == 1
    batching = replace(batching, micro_batch_multiple=multiple, shares_prompts=shares)
    samples = []
    for i, own in enumerate(lengths):
        place = {"group": i // group_size, "index": sequences * (i % group_size)}
        prompt = min(map(min, lengths[i - i % group_size :][:group_size])) - 1 if sequences == 1 else 0
        teaches = sequences == 2 or i // group_size not in silent
        advantage = (i + 1.0) * teaches
        samples.append(
            PlannedSample(**place, lengths=own, advantage=advantage, mask=1.0, prompt=prompt, teaches=teaches)
        )
    refs = [(f"ref{i}", 0) for i in range(-(-num // group_size))]
    if sequences == 1:
        plan = plan_of([n for (n,) in lengths], batching, group_size, silent, **layout)
    else:
        plan = plan_samples([[pair] for pair in samples], refs, batching=batching, **layout)
    assert plan.groups == refs
    check_plan(plan, samples, batching, **layout)


def test_a_step_is_filled_up_with_copies_whose_index_counts_from_the_end_of_their_group():
    rows = [PlannedSample(group=0, index=i, lengths=(n,), advantage=1.0, mask=1.0) for i, n in enumerate((5, 3, 4))]
    samples = [[rows[0], rows[2]], [rows[1]]]
    plan = plan_samples(samples, ["ref"], num_ranks=2, global_batch_size=2, batching=fixed(2, 2))
    planned = [s for rank in plan.ranks for step in rank.train for mb in step for s in mb]
    assert [(s.index, s.lengths, s.advantage, s.mask) for s in planned if s not in rows] == [(-2, (3,), 0.0, 0.0)]


def test_a_pair_takes_the_room_of_two_sequences_of_its_longest():
    pairs = [(60, 20), (50, 49), (30, 30), (10, 8)]
    samples = [[PlannedSample(group=0, index=2 * i, lengths=p, advantage=0.0, mask=1.0)] for i, p in enumerate(pairs)]
    plan = partial(plan_samples, samples, ["ref"], num_ranks=1, global_batch_size=4)
    assert sizes_of(plan(batching=padded(128, 192, 64))) == ([1, 1, 1, 1], [1, 1, 1, 1])
    assert sizes_of(plan(batching=padded(240, 360))) == ([2, 2], [3, 1])
    assert sizes_of(plan(batching=fixed(2, 4))) == ([2, 2], [4])
    # Rounded up, the longest pair would take 128 tokens; there is no smaller budget that would do for its length.
    assert sizes_of(plan(batching=padded(120, 120, 64)))[0] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"a sample of 80 tokens.*policy\.dynamic_batching\.train_mb_tokens.* 120"):
        plan(batching=padded(119, 120))


def sizes_of(plan: BatchPlan) -> tuple[list[int], list[int]]:
    (rank,) = plan.ranks
    return [len(batch) for batch in rank.train[0]], [len(batch) for batch in rank.logprobs]


@pytest.mark.parametrize(
    ("prompt", "answers", "are_whole"),
    [(20, [[4, 5], [5, 4], [4, 4], [5, 5]], True), (2, [[60, 59], [10, 9], [10, 8], [10, 7]], False)],
)
def test_samples_that_share_a_prompt_stay_together_unless_a_rank_waits_longer_for_it(prompt, answers, are_whole):
    groups = [handle(*(sample(prompt=prompt, generated=n) for n in of_group)) for of_group in answers]
    batching = replace(fixed(2, 4), shares_prompts=True)
    ones = [[1.0, 1.0]] * 4
    plan = plan_batch(groups, ones, ones, num_ranks=2, global_batch_size=8, batching=batching)
    work = [sum(batching.cost(batch) for batch in rank.train[0]) for rank in plan.ranks]
    assert max(work) < 1.1 * min(work)
    planned = [{s.group for s in batch} for rank in plan.ranks for batch in rank.train[0]]
    assert sorted(map(tuple, planned)) == [(0,), (1,), (2,), (3,)] if are_whole else {0} not in planned
    assert batching.saved_tokens(plan.ranks[0].train[0][0]) == (prompt if are_whole else 0)


def test_dynamic_batches_take_what_the_budget_of_padded_tokens_allows():
    plan = plan_of([64, 60, 33, 30, 16, 10, 9, 3], padded(128, 64, 16), num_ranks=1, global_batch_size=8)
    assert lengths_of(plan.ranks[0].train[0]) == [[64, 60], [33, 30], [16, 10, 9, 3]]
    assert lengths_of(plan.ranks[0].logprobs) == [[64], [60], [33], [30, 16], [10, 9, 3]]
    metrics = measure_packing(plan, padded(128, 64, 16)).metrics()
    assert metrics["packing/fill"] == pytest.approx(225 / (3 * 128))
    assert metrics["packing/padding_fraction"] == pytest.approx(1 - 225 / (2 * 64 + 2 * 48 + 4 * 16))


def test_packed_batches_are_as_few_as_will_do_and_level():
    lengths = [90, 80, 70, 60, 40, 30, 20, 10] * 2
    plan = plan_of(lengths, packed(100, 200), num_ranks=2, global_batch_size=16)
    assert [len(rank.train[0]) for rank in plan.ranks] == [4, 4], "800 tokens by 100"
    assert [len(rank.logprobs) for rank in plan.ranks] == [2, 2]
    assert measure_packing(plan, packed(100, 200)).fill == 1.0
    # With room to spare the micro-batches are even, not the first full and the last empty.
    plan = plan_of(lengths, packed(300, 300), num_ranks=2, global_batch_size=16)
    assert [sorted(map(sum, lengths_of(rank.train[0]))) for rank in plan.ranks] == [[200, 200], [200, 200]]
    # The two answers that share a prompt would be joined: three units, each of which fills a micro-batch of its own.
    sharing = replace(packed(100, 100), shares_prompts=True)
    plan = plan_of([99, 99, 6, 5], sharing, 2, num_ranks=2, global_batch_size=4)
    assert [sorted(lengths_of(rank.train[0])) for rank in plan.ranks] == [[[6], [99]], [[5], [99]]]
    with pytest.raises(ValueError, match=r"a sample of 99 tokens.*sequence_packing\.logprob_mb_tokens.* 100"):
        plan_of([99, 10], packed(120, 99, length_multiple=4), num_ranks=1, global_batch_size=2)


@named(
    "batching",
    {
        "packed": packed(8192, 8192),
        "padded": padded(8192, 8192, 64),
        "fixed": fixed(4, 4),
    },
)
def test_micro_batches_that_ranks_do_at_the_same_time_cost_the_same(batching):
    lengths = np.random.default_rng(5).lognormal(math.log(512), 0.6, 1024).clip(1, 2048).astype(int).tolist()
    plan = plan_of(lengths, batching, num_ranks=8, global_batch_size=1024)
    metrics = measure_packing(plan, batching).metrics()
    assert metrics["packing/work_imbalance"] < 1.01 and metrics["packing/wait_imbalance"] < 1.03


@pytest.mark.parametrize("batching", [packed(200, 200), fixed(2, 2)], ids=["packed", "fixed"])
def test_images_count_in_the_balance_of_ranks_and_micro_batches(batching):
    """Eight samples of as many tokens, two of them with an image that costs as much as 100 tokens."""
    batching = replace(batching, pixel_weight=0.1)
    groups = [handle(sample(prompt=1, generated=99)) for _ in range(8)]
    for group in groups[:2]:
        group.samples[0].images = {"d": 900, "e": 100}
    ones = [[1.0]] * len(groups)
    plan = plan_batch(groups, ones, ones, batching=batching, num_ranks=2, global_batch_size=8)
    for rank in plan.ranks:
        assert sorted(s.num_pixels for batch in rank.train[0] for s in batch) == [0, 0, 0, 1000]
        assert batching.cost([s for batch in rank.train[0] for s in batch]) == pytest.approx(4 * 200 + 100)


DYNAMIC = {"dynamic_batching": {"enabled": True}, "make_sequence_length_divisible_by": 48}
PACKING = {"sequence_packing": {"enabled": True, "train_mb_tokens": 4096}}


@named(
    "changes, want",
    {
        "fixed": ({}, fixed(2, 3)),
        "padded": (DYNAMIC, padded(2044, 3066, 192)),
        "packed": (PACKING, packed(4096, 3066, algorithm="modified_first_fit_decreasing")),
    },
)
def test_batching_of_a_policy(changes, want):
    sizes = {"max_total_sequence_length": 1022, "train_micro_batch_size": 2, "logprob_batch_size": 3}
    policy = RolloutPolicyConfig.model_validate(build().policy.model_dump() | sizes | changes)
    assert Batching.of(policy, quadratic_weight=0.01) == want
