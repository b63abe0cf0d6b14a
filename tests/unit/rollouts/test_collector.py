"""Groups as they finish: how many are under way, and what happens when a worker dies meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError
from nemo_rl.models.generation.interfaces import TENANT
from nemo_rl.rollouts.collector import GroupRequest, RolloutCollector
from nemo_rl.types import Prompt, SamplingParams


@dataclass
class FakeGroup:
    """Finishes the oldest call and, every third time, the one after it. Fails at the given numbers of waits."""

    failures: dict[int, WorkerError] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    most_under_way: int = 0
    num_waits: int = 0
    generations: list[list[str]] = field(default_factory=list)

    def start_one(self, index: int, method: str, request: GroupRequest) -> str:
        self.asked.append(request.group_id)
        return f"{len(self.asked)}:{request.group_id}"

    def call_one(self, index: int, method: str, workers: list[str]) -> None:
        self.generations.append(workers)

    def wait_some(self, refs: Sequence[str]) -> dict[str, str]:
        self.num_waits += 1
        self.most_under_way = max(self.most_under_way, len(refs))
        if self.num_waits in self.failures:
            raise self.failures[self.num_waits]
        return {ref: ref.partition(":")[2] for ref in refs[: 2 if self.num_waits % 3 == 0 else 1]}


class OverFakes(RolloutCollector):
    """A collector whose worker group is a fake; a dead rollout worker is replaced by another fake."""

    def __init__(self, group: Any) -> None:
        self._accelerator = Accelerator(exclusive=False)
        self._accelerator.register(TENANT, lambda: None, lambda: None)
        self.group = group
        self.groups = [group]
        self.restart_generation = lambda: ["engine, started again"]

    def _restart(self) -> None:
        self.group: Any = FakeGroup()
        self.groups.append(self.group)


def requests(num: int) -> list[GroupRequest]:
    return [
        GroupRequest(
            group_id=f"g{n}",
            prompt=Prompt(prompt_id=f"d:{n}", row={}, idx=n, task_name="d"),
            num_generations=1,
            sampling=SamplingParams(max_new_tokens=1),
            seed_step=0,
        )
        for n in range(num)
    ]


def played(collector: RolloutCollector, num: int, in_flight: int) -> list[str]:
    return [str(handle) for handles in collector.stream(iter(requests(num)), in_flight) for handle in handles]


def error(kind: type[WorkerError], worker: str, exception_type: str = "") -> WorkerError:
    return kind(f"{worker} failed", worker=worker, rank=0, method="collect", exception_type=exception_type)


def test_so_many_are_under_way_and_all_come_back():
    group = FakeGroup()
    assert sorted(played(OverFakes(group), 10, 4)) == sorted(f"g{n}" for n in range(10))
    assert group.most_under_way == 4 and group.asked == [f"g{n}" for n in range(10)]
    assert played(OverFakes(FakeGroup()), 0, 4) == []


def test_what_was_under_way_is_played_again_when_an_engine_died():
    group = FakeGroup(failures={3: error(WorkerError, "rollout-0", "EngineDied")})
    assert sorted(played(OverFakes(group), 8, 3)) == sorted(f"g{n}" for n in range(8))
    assert group.asked[5:8] == ["g2", "g3", "g4"], "those under way, before new ones"
    assert group.generations == [["engine, started again"]]


def test_what_was_under_way_is_played_again_when_the_rollout_worker_died():
    collector = OverFakes(FakeGroup(failures={2: error(WorkerDied, "rollout-0")}))
    assert sorted(played(collector, 5, 2)) == sorted(f"g{n}" for n in range(5))
    assert len(collector.groups) == 2 and collector.groups[1].asked[:2] == ["g1", "g2"]


@pytest.mark.parametrize(
    "failures",
    [
        {2: error(WorkerError, "rollout-0", "KeyError")},
        {2: error(WorkerDied, "generation-0-0")},
        {n: error(WorkerError, "rollout-0", "EngineDied") for n in range(2, 9)},  # again and again
    ],
)
def test_what_starting_again_does_not_help_against_ends_it(failures):
    with pytest.raises(WorkerError):
        played(OverFakes(FakeGroup(failures=failures)), 5, 2)
