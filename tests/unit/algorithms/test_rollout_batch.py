from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.rollout_batch import plan_batch, token_imbalance
from nemo_rl.types import GroupHandle, SampleMeta, SampleStatus


def handle(number: int, lengths: list[int]) -> GroupHandle:
    samples = [
        SampleMeta(
            sample_id=f"{number}/{i}",
            status=SampleStatus.COMPLETED,
            length=length,
            num_prompt_tokens=1,
            num_generated_tokens=length - 1,
            num_turns=1,
            reward=0.0,
            weight_version=0,
        )
        for i, length in enumerate(lengths)
    ]
    return GroupHandle(group_id=str(number), prompt_id="p", task_name="t", ref=f"ref{number}", samples=samples)


@settings(deadline=None, max_examples=50)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    per_rank=st.integers(1, 6),
    num_steps=st.integers(1, 3),
    micro=st.integers(1, 7),
    data=st.data(),
)
def test_every_sample_is_trained_and_scored_exactly_once_on_one_rank(ranks, per_rank, num_steps, micro, data):
    global_batch = ranks * per_rank
    num_samples = global_batch * num_steps
    lengths = data.draw(st.lists(st.integers(2, 99), min_size=num_samples, max_size=num_samples))
    groups = [handle(i, [length]) for i, length in enumerate(lengths)]
    plan = plan_batch(
        groups,
        [[float(i)] for i in range(len(groups))],
        [[1.0]] * len(groups),
        num_ranks=ranks,
        global_batch_size=global_batch,
        micro_batch_size=micro,
        logprob_batch_size=3,
    )
    trained = [s.group for rank in plan.ranks for step in rank.train for mb in step for s in mb]
    assert sorted(trained) == list(range(len(groups)))
    for rank in plan.ranks:
        assert len(rank.train) == num_steps
        mine = sorted(s.group for step in rank.train for mb in step for s in mb)
        assert mine == sorted(s.group for mb in rank.logprobs for s in mb)
        for number, step in enumerate(rank.train):
            assert sum(map(len, step)) == per_rank
            assert all(number * global_batch <= s.group < (number + 1) * global_batch for mb in step for s in mb)
            assert all(s.advantage == s.group and s.length == lengths[s.group] for mb in step for s in mb)
            assert len({len(r.train[number]) for r in plan.ranks}) == 1, "ranks enter the same collectives"


def test_lengths_are_dealt_evenly_and_neighbours_share_micro_batches():
    groups = [handle(i, [length]) for i, length in enumerate([10, 80, 20, 70, 30, 60, 40, 50])]
    plan = plan_batch(
        groups, [[0.0]] * 8, [[1.0]] * 8, num_ranks=2, global_batch_size=8, micro_batch_size=2, logprob_batch_size=4
    )
    assert [[s.length for s in mb] for mb in plan.ranks[0].train[0]] == [[80, 50], [40, 10]]
    assert token_imbalance(plan) == 1.0
