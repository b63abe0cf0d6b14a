"""Groups as they finish: the number under way, and the death of a worker meanwhile."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError, WorkerHang
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.rollouts.collector import MAX_RESTARTS, RolloutCollector
from nemo_rl.rollouts.group_keeper import KEEPER
from nemo_rl.rollouts.rollout_worker import GroupRequest, RolloutWorker
from tests.fakes import handle, sample
from tests.tables import named
from tests.unit.rollouts.engines import error, group_request


class Handle(str):
    """A handle of a group, and its reference."""

    group_id, ref = property(str), property(lambda self: self)

    def hex(self) -> str:
        return f"ref of {self}"


class Keeper:
    """Notes the groups to forget."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[str, str]] = []
        self.forget = self

    def remote(self, unused: list[tuple[str, str]]) -> None:
        self.forgotten += unused


METRICS = {"math/correct": 0.5}


@dataclass
class FakeGroup:
    """Finishes the first group of a call and, every third time, one of the next call. Fails at the given waits."""

    failures: dict[int, WorkerError] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)
    most_under_way: int = 0
    num_calls: int = 0
    num_waits: int = 0
    generations: list[list[str]] = field(default_factory=list)

    def start_one(self, index: int, method: Callable[..., Any], asked: Any, *groups: Any) -> str:
        self.num_calls += 1
        if method == RolloutWorker.with_groups:  # asks for metrics
            return method.__name__
        names = [request if isinstance(request, str) else request.group_id for request in asked]
        self.asked += [name for name in names if name not in self.under_way]  # others are asked for again
        self.under_way.update(names)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return f"{self.num_calls}:{','.join(names)}"

    def call_one(self, index: int, method: Callable[..., Any], workers: Any, *groups: Any) -> Any:
        if method == RolloutWorker.with_groups:
            return METRICS
        self.generations.append(workers)
        self.under_way.clear()

    def wait_any(self, refs: Sequence[str]) -> list[str]:
        self.num_waits += 1
        return list(refs[: 2 if self.num_waits % 3 == 0 else 1])

    def done(self, refs: Sequence[str]) -> list[str]:
        return list(refs[:1])

    def wait(self, refs: Sequence[str]) -> list[Any]:
        if self.num_waits in self.failures:
            raise self.failures[self.num_waits]
        if refs == ["with_groups"]:
            return [METRICS]
        first = [ref.partition(":")[2].partition(",")[0] for ref in refs]
        self.under_way.difference_update(first)
        return [[Handle(name)] for name in first]


class OverFakes(RolloutCollector):
    """A collector over a fake worker group; another fake replaces a dead one."""

    def __init__(self, group: Any) -> None:
        self._playing, self._finished, self._submitted = {}, {}, set()
        self._num_restarts, self._postponed, self._recording = 0, None, {}
        self._unused, self._keeper = deque(), Keeper()
        self._accelerator = Accelerator(exclusive=False)
        self._accelerator.register(GENERATION, lambda: None, lambda: None)
        self.group, self.groups = group, [group]
        restart: Any = lambda: ["engine, started again"]  # noqa: E731
        self.engines: Any = SimpleNamespace(restart_dead_workers=restart, abandon_requests=lambda: None)
        self._generation_workers: list[Any] = ["engine"]
        self.keeper_loss: str | None = None
        self._keeper_loss = lambda: self.keeper_loss

    def _restart(self) -> None:
        self.group: Any = FakeGroup()
        self.groups.append(self.group)


def requests(num: int) -> list[GroupRequest]:
    return [group_request(n) for n in range(num)]


def played(collector: RolloutCollector, num: int, in_flight: int) -> list[str]:
    return [str(handle) for handles in collector.stream(iter(requests(num)), in_flight) for handle in handles]


def test_so_many_are_under_way_and_all_come_back():
    group = FakeGroup()
    assert sorted(played(OverFakes(group), 10, 4)) == sorted(f"g{n}" for n in range(10))
    assert group.most_under_way == 4 and group.asked == [f"g{n}" for n in range(10)]
    assert played(OverFakes(FakeGroup()), 0, 4) == []


def test_what_was_under_way_is_played_again_when_an_engine_or_the_rollout_worker_died():
    group = FakeGroup(failures={3: error(WorkerError, "rollout-0", "EngineDied")})
    assert sorted(played(OverFakes(group), 8, 3)) == sorted(f"g{n}" for n in range(8))
    assert sorted(group.asked[5:8]) == ["g2", "g3", "g4"], "those under way, before new ones"
    assert group.generations == [["engine, started again"]]
    collector = OverFakes(FakeGroup(failures={2: error(WorkerDied, "rollout-0")}))
    assert sorted(played(collector, 5, 2)) == sorted(f"g{n}" for n in range(5))
    assert len(collector.groups) == 2 and collector.groups[1].asked[:2] == ["g1", "g2"]


def test_what_starting_again_does_not_help_against_ends_it():
    again_and_again = {n: error(WorkerError, "rollout-0", "EngineDied") for n in range(2, 9)}
    once = (error(WorkerError, "rollout-0", "KeyError"), error(WorkerDied, "generation-0-0"))
    for failures in (again_and_again, *({2: failure} for failure in once)):
        with pytest.raises(WorkerError):
            played(OverFakes(FakeGroup(failures=failures)), 5, 2)


@named(
    "failure, loss",
    {
        "told by a worker": (error(WorkerError, "rollout-0", "KeeperLost"), None),  # the rollout worker says so
        "a worker hangs": (error(WorkerHang, "rollout-0"), "it answers nothing"),  # the rollout worker waits for it
        "the owner died": (error(WorkerError, "rollout-0", "OwnerDiedError"), "gone"),
    },
)
def test_the_loss_of_finished_groups_is_not_blamed_on_who_needed_them(failure, loss):
    collector = OverFakes(FakeGroup(failures={2: failure}))
    collector.keeper_loss = loss
    with pytest.raises(WorkerDied, match="group_keeper-0, the process that holds finished groups, is lost") as told:
        played(collector, 5, 2)
    assert told.value.is_of(KEEPER)


def test_a_lost_keeper_is_named_after_as_many_restarts_as_are_allowed():
    # A node that is lost takes more with it than may be started again by itself.
    failures = {number: error(WorkerError, "rollout-0", "EngineDied") for number in range(1, 1 + MAX_RESTARTS)}
    failures[1 + MAX_RESTARTS] = error(WorkerError, "rollout-0", "KeeperLost")
    with pytest.raises(WorkerDied, match="group_keeper-0"):
        played(OverFakes(FakeGroup(failures=failures)), 5, 2)


@pytest.mark.parametrize("synced", [False, True])
def test_beside_training_engines_are_left_alone(synced):
    group = FakeGroup(failures={0: error(WorkerError, "rollout-0", "EngineDied")})
    collector = OverFakes(group)
    collector.submit(requests(2))
    collector.poll()
    assert collector.finished(wait=False) == [] and group.generations == [] and group.asked == ["g0", "g1"]
    group.failures = {}
    if synced:  # the sync of weights found the engine dead as well
        collector.use_generation(["engine, started again"])
    collector.wait_all()
    assert group.generations == [["engine, started again"]] and group.asked == ["g0", "g1", "g0", "g1"]
    assert len(collector.finished(wait=False)) == 2


def test_groups_are_held_as_long_as_anybody_has_their_handles():
    collector = OverFakes(FakeGroup())
    handles = collector.collect(requests(3))
    collector.collect(requests(2))
    assert collector._keeper.forgotten == []
    kept = handles.pop()
    del handles
    collector.collect(requests(1))
    assert ("g2", "ref of g2") not in collector._keeper.forgotten and ("g0", "ref of g0") in collector._keeper.forgotten
    del kept
    collector.collect(requests(1))
    assert ("g2", "ref of g2") in collector._keeper.forgotten


@pytest.mark.parametrize("death", ["none", "found while they are waited for", "found before"])
def test_metrics_are_asked_for_before_they_are_waited_for_and_again_if_the_rollout_worker_died(death):
    group = FakeGroup(failures={0: error(WorkerDied, "rollout-0")} if death != "none" else {})
    collector = OverFakes(group)
    answer = collector.environment_metrics([handle(sample())])
    assert group.num_calls == 1
    if death == "found before":
        collector._restart()
    assert answer() == METRICS and len(collector.groups) == 1 + (death != "none")
