"""The window of versions: no group too old, none lost, none twice, whatever finishes when."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.async_grpo import OpenGroup, ReplayBuffer
from nemo_rl.rollouts.rollout_worker import GroupRequest
from tests.fakes import handle
from tests.unit.rollouts.engines import group_request


def requests(start: int, num: int) -> list[GroupRequest]:
    return [group_request(number, name="") for number in range(start, start + num)]


def taken(buffer: ReplayBuffer, num: int, version: int) -> list[str] | None:
    groups = buffer.take(num, version)
    return None if groups is None else [group.group_id for group in groups]


def test_by_arrival_a_slow_group_holds_nobody_up_until_it_is_due():
    buffer = ReplayBuffer(groups_per_step=1, max_age=2, open_steps=2, order="arrival")
    buffer.dispatch(requests(0, 2), 0)
    for version in range(2):  # group 0 is slow
        buffer.finish([handle(name=f"{version + 1}")])
        assert taken(buffer, 1, version) == [f"{version + 1}"]
        buffer.dispatch(requests(version + 2, 1), version + 1)
    buffer.finish([handle(name="3")])
    assert taken(buffer, 1, 2) is None, "group 0 is from version 0: now or never"
    buffer.finish([handle(name="0")])
    assert taken(buffer, 1, 2) == ["0"] and taken(buffer, 1, 3) == ["3"]
    buffer = ReplayBuffer(groups_per_step=1, max_age=3, open_steps=3, order="arrival")
    buffer.dispatch(requests(0, 3), 0)
    buffer.finish([handle(name="2")])
    buffer.finish([handle(name="1")])
    assert taken(buffer, 1, 0) == ["2"], "it came first"


@settings(deadline=None, max_examples=30)
@given(
    per_step=st.integers(1, 4),
    max_age=st.integers(1, 4),
    open_steps=st.integers(1, 5),
    order=st.sampled_from(["in_order", "arrival"]),
    seed=st.integers(0, 10**6),
    resumes=st.booleans(),
)
def test_none_too_old_none_lost_none_twice(per_step, max_age, open_steps, order, seed, resumes):
    rng = random.Random(seed)

    def make() -> ReplayBuffer:
        steps = min(open_steps, max_age + 1)
        return ReplayBuffer(groups_per_step=per_step, max_age=max_age, open_steps=steps, order=order)

    buffer, dispatched_at = make(), dict[str, int]()
    playing, trained = list[str](), list[str]()
    for version in range(20):
        while len(buffer.groups) + per_step <= buffer.capacity:
            new = requests(len(dispatched_at), per_step)
            buffer.dispatch(new, version)
            dispatched_at |= {request.group_id: version for request in new}
            playing += [request.group_id for request in new]
        if resumes and rng.random() < 0.3:
            before, buffer = buffer, make()
            buffer.restore([OpenGroup(**vars(group)) for group in before.groups])
        while (groups := taken(buffer, per_step, version)) is None:
            # Short jobs first, mostly: some group is left behind again and again.
            chosen = playing.pop(rng.randrange(len(playing)) if rng.random() < 0.5 else -1)
            buffer.finish([handle(name=chosen)])
        assert len(groups) == per_step and groups == sorted(groups, key=int)
        assert all(0 <= version - dispatched_at[group] <= max_age for group in groups)
        trained += groups
    assert len(set(trained)) == len(trained)
    left = {group.request.group_id for group in buffer.groups}
    assert left.isdisjoint(trained) and left | set(trained) == set(dispatched_at)
    if order == "in_order":
        assert trained == sorted(trained, key=int)
