"""A group of workers is called as one, and names the worker that failed, its node and its method."""

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.errors import ResourceInsufficientError, WorkerDied, WorkerError, WorkerHang
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup, _groups_by_node
from nemo_rl.utils.venvs import VenvBuildError, python_executable_for
from tests.tables import named
from tests.unit.distributed.conftest import ECHO
from tests.unit.distributed.workers import EchoWorker
from tests.unit.utils.test_venvs import PYPROJECT

WORKERS = "tests.unit.distributed.workers"
TWO_BY_TWO = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


@pytest.fixture
def cluster(ray_local: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2, name="test") as cluster:
        yield cluster


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def eventually(condition: Callable[[], bool], limit_s: float = 600.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_can_be_had_as_they_come(echo_pair: RayWorkerGroup) -> None:
    refs = [echo_pair.start_one(0, EchoWorker.wait_async, seconds) for seconds in (1.0, 0.0)]
    assert echo_pair.done(refs[:1]) == []
    assert echo_pair.wait_any(refs) == refs[1:] and echo_pair.wait(refs[1:]) == [0.0]
    assert echo_pair.wait(refs[:1]) == [1.0]
    slow = echo_pair.start_one(1, EchoWorker.wait_async, 30.0)
    with pytest.raises(WorkerHang, match="no answer from echo-1"):
        echo_pair.wait_any([slow], timeout_s=0.5)


def test_calls_reach_the_workers_they_name_and_wrong_ones_are_refused(echo_pair: RayWorkerGroup) -> None:
    assert echo_pair.call_all(EchoWorker.echo, 1, k=2) == [("hello", 0, (1,), {"k": 2}), ("hello", 1, (1,), {"k": 2})]
    each = echo_pair.call_each(EchoWorker.echo, [("a",), ("b", "c")], k=2)
    assert each == [("hello", 0, ("a",), {"k": 2}), ("hello", 1, ("b", "c"), {"k": 2})]
    assert echo_pair.call_one(1, EchoWorker.echo) == ("hello", 1, (), {})
    refs = echo_pair.start_all(EchoWorker.echo)
    assert [result[1] for result in echo_pair.wait(refs[::-1])] == [1, 0]
    with pytest.raises(ValueError, match=r"echo.echo: 1 sets of arguments for 2 workers"):
        echo_pair.call_each(EchoWorker.echo, [("a",)])
    with pytest.raises(ValueError, match="give each worker a tuple"):
        echo_pair.call_each(EchoWorker.echo, ["a", "b"])  # type: ignore[list-item]
    with pytest.raises(WorkerError, match="EchoWorker has no method 'ecko'"):
        echo_pair.wait(echo_pair.run_all_workers_single_data("ecko"))


def test_bundles_are_counted_on_each_node() -> None:
    nodes = [[0, 1, 2], [3, 4]]
    assert _groups_by_node(nodes, 2, None) == [[0], [1], [3], [4]]
    assert _groups_by_node(nodes, [1, 2], None) == [[0], [3], [4]]
    assert _groups_by_node(nodes, None, [(1, [0, 1]), (0, [2])]) == [[3, 4], [2]]


def test_environment_holds_the_rank_and_what_was_given(echo_pair: RayWorkerGroup, monkeypatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_DRIVER", "token")
    environments = echo_pair.call_all(EchoWorker.apply, lambda: dict(os.environ))
    for rank, environment in enumerate(environments):
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0", "GIVEN": "yes"}
        assert expected.items() <= environment.items()
        assert environment["QUOTED"] == """it's yes "$5";"""
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert "A_SECRET_OF_THE_DRIVER" not in environment
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]


def test_arrays_through_the_controller_are_counted_and_references_are_not(echo_pair: RayWorkerGroup) -> None:
    before = echo_pair.controller_tensor_bytes
    array = np.zeros(1000, np.float32)
    result = echo_pair.call_one(0, EchoWorker.echo, ray.put(array), {"ref": ray.put(array)})
    assert result[2][0].shape == (1000,)  # the reference at the top level arrived as its value
    assert echo_pair.controller_tensor_bytes - before == 4000  # in the result alone
    echo_pair.call_all(EchoWorker.echo, [array])
    assert echo_pair.controller_tensor_bytes - before == 4000 + 2 * 2 * 4000


def test_a_worker_that_raises_while_the_other_is_stuck_is_named_and_one_that_is_killed_before_its_peers(cluster):
    with RayWorkerGroup(cluster, ECHO, name_prefix="policy") as group:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)policy-1 \(rank 1, node .*pid \d+\) failed in raise_on") as caught:
            group.call_all(EchoWorker.raise_on, 1)
        assert time.monotonic() - start < 50
        error = caught.value
        assert (error.worker, error.rank, error.method) == ("policy-1", 1, "raise_on")
        assert error.exception_type == "KeyError" and 'raise KeyError("missing row")' in error.remote_traceback
        refs = group.start_all(EchoWorker.raise_on, 1)  # as one that misses its peer in a collective does
        group.start_one(1, EchoWorker.apply, time.sleep, 60)
        pid = group.members[0].identity.pid  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"policy-0 \(rank 0, node .*, pid {pid}\) died in raise_on") as died:
            group.wait(refs)
        assert died.value.rank == 0
        start = time.monotonic()
        group.shutdown(EchoWorker.echo, grace_s=60)  # the other worker sleeps, and is not waited for
        assert time.monotonic() - start < 50


@pytest.mark.over_20s("four calls that never end, and the questions to stuck workers, take 15 s on an idle machine")
def test_a_stuck_worker_is_named_with_its_stack_and_a_stopped_one_is_said_to_be_stopped(cluster):
    with RayWorkerGroup(cluster, ECHO, name_prefix="policy", timeout_s=2) as group:
        for method, args in ((EchoWorker.wait_async, [(0.0,), (60.0,)]), (EchoWorker.sleep_on, [(1, 60), (1, 60)])):
            name = method.__name__
            with pytest.raises(WorkerHang, match=rf"no answer from policy-1 \(rank 1.* in {name} after 2 s") as caught:
                group.call_each(method, args)
            assert f"in {name}" in str(caught.value).partition("\n")[2]
            assert f"{name} for " in str(caught.value)
            assert "policy-0" not in str(caught.value)
        with pytest.raises(WorkerHang, match=r"(?s)policy-0.*\n.*in block_loop"):  # an event loop that stands still
            group.wait(group.start_all(EchoWorker.block_loop, 60.0), 5)  # the call has to arrive first
        pid = group.members[0].identity.pid  # type: ignore[union-attr]
        os.kill(pid, signal.SIGSTOP)
        refs = [group.start_one(0, EchoWorker.echo) for _ in range(3)]
        with pytest.raises(WorkerHang, match=rf"policy-0.*(?s:.)*state of process {pid}: T \(stopped\)") as caught:
            group.wait(refs)
        assert str(caught.value).count("policy-0") == 2, "in the list of names and above its state"
    assert not alive(pid)


@pytest.mark.over_20s("the shortest time that a start is waited for is 10 s, and a busy machine takes 8 to begin one")
def test_starts_that_hang_are_named_and_one_that_is_stopped_is_not_waited_for_as_long_as_a_constructor(cluster):
    """Both at once."""
    cluster.bundles()

    def hang(worker: str, *args: Any, **how: Any) -> str:
        with pytest.raises(WorkerHang) as caught:
            RayWorkerGroup(cluster, RayWorkerBuilder(f"{WORKERS}.{worker}", *args), num_workers=1, **how)
        return str(caught.value)

    with ThreadPoolExecutor() as threads:
        slow = threads.submit(hang, "SlowStartWorker", 60, name_prefix="slow", start_timeout_s=20)
        still = threads.submit(hang, "StoppedWorker", name_prefix="still", timeout_s=1)
    assert re.search(r"(?s)slow-0 .* in __init__ .*workers.py.*time.sleep\(seconds\)", slow.result())
    assert re.search(r"no answer from still-0 .* in __init__ after 10 s\n.*T \(stopped\)", still.result())


def test_bundles_are_booked_at_first_use_and_failed_starts_and_shutdown_release_what_they_took(echo_pair, cluster):
    assert eventually(lambda: free_cpus() == 4)  # echo_cluster holds four of eight
    assert [(bundle.node_rank, bundle.gpu_id) for bundle in cluster.bundles()] == [(0, None), (0, None)]
    assert len(cluster.get_placement_groups()) == 1 and eventually(lambda: free_cpus() == 0)
    with pytest.raises(WorkerError, match=r"(?s)echo-1 .* failed in __init__: ValueError: no such weights"):
        failing = RayWorkerBuilder(f"{WORKERS}.EchoWorker", fail_on_rank=1)
        RayWorkerGroup(cluster, failing, name_prefix="echo", num_workers=2)
    assert eventually(lambda: free_cpus() == 4)
    group = RayWorkerGroup(cluster, ECHO, name_prefix="echo")  # the bundles can be had again
    children = group.call_all(EchoWorker.apply, lambda: subprocess.Popen(["sleep", "600"]).pid)
    pids = [*children, *group.call_all(EchoWorker.apply, os.getpid)]
    assert all(alive(pid) for pid in pids)
    group.shutdown(EchoWorker.echo)
    group.shutdown()
    assert eventually(lambda: not any(alive(pid) for pid in pids)), "no process is left behind"
    cluster.shutdown()
    assert eventually(lambda: free_cpus() == 4)


def test_impossible_groups(cluster: RayVirtualCluster) -> None:
    for how, message in (
        ({"num_workers": 3}, "3 workers asked for on a cluster of 2 bundles"),
        ({"workers_per_node": 3}, r"bundles \[2\] of node 0 asked for, and the nodes have \[2\] bundles"),
        ({"py_executable": "/nowhere/python"}, "py_executable /nowhere/python does not exist"),
        ({"bundle_groups": [[0], [0]]}, "bundles of its own"),
        ({"sharding": TWO_BY_TWO}, "4 ranks for 2 workers"),
    ):
        with pytest.raises(ValueError, match=message):
            RayWorkerGroup(cluster, ECHO, name_prefix="echo", **how)
    with pytest.raises(WorkerError, match="no module 'nowhere' can be imported"):
        RayWorkerGroup(cluster, RayWorkerBuilder("nowhere.Worker"), name_prefix="echo", num_workers=1)


def test_groups_share_bundles_up_to_the_limit_and_have_process_groups_of_their_own(echo_cluster, echo_pair):
    with RayWorkerGroup(echo_cluster, ECHO, name_prefix="reward", bundle_groups=[[0, 1]]) as other:
        with pytest.raises(ValueError, match=r"bundle 0 of cluster 'echo' holds \['echo', 'reward'\] already"):
            RayWorkerGroup(echo_cluster, ECHO, name_prefix="generation")
        assert echo_pair.call_all(EchoWorker.join) == [2, 2] and other.call_all(EchoWorker.join) == [1]
        assert echo_pair.call_all(EchoWorker.sum_ranks) == [1.0, 1.0]
        assert other.call_all(EchoWorker.sum_ranks) == [0.0], "it met the other group"
    assert echo_pair.call_all(EchoWorker.join) == [2, 2], "again"
    assert echo_pair.call_all(EchoWorker.sum_ranks) == [1.0, 1.0]


def test_decorated_workers_of_two_nodes_are_called_by_axis_and_get_values_for_references(ray_local: None) -> None:
    builder = RayWorkerBuilder(f"{WORKERS}.DecoratedWorker", ray.put("hi"))
    how: Any = {"remote_worker_builder": builder, "workers_per_node": [1, 3], "sharding_annotations": TWO_BY_TWO}
    with RayVirtualCluster([1, 3], use_gpus=False) as cluster, RayWorkerGroup(cluster, **how) as group:
        assert cluster.bundles_by_node() == [[0], [1, 2, 3]]
        environments = group.call_all(EchoWorker.apply, lambda: dict(os.environ))
        assert [environment["NODE_RANK"] for environment in environments] == ["0", "1", "1", "1"]
        assert [environment["LOCAL_RANK"] for environment in environments] == ["0", "0", "1", "2"]
        leaders = group.run_all_workers_single_data("echo", run_rank_0_only_axes=["tensor_parallel"], k=2)
        assert ray.get(leaders) == [("hi", rank, (), {"k": 2}) for rank in (0, 2)]
        refs = group.run_all_workers_multiple_data("echo", k=[5, 6, 7, 8], common_kwargs={"c": 1})
        assert ray.get(refs) == [("hi", rank, (), {"k": 5 + rank, "c": 1}) for rank in range(4)]
        with pytest.raises(ValueError, match=r"items for \{'k': 2\}, and 4 workers are called"):
            group.run_all_workers_multiple_data("echo", k=[5, 6])
        sharded = partial(group.run_all_workers_sharded_data, "echo")
        rows: Any = {"data": ["a", "b"], "in_sharded_axes": ["data_parallel"]}
        of_rows = [("hi", 0, (), {"data": "a"}), ("hi", 2, (), {"data": "b"})]
        future = sharded(**rows, replicate_on_axes=["tensor_parallel"], output_is_replicated=["tensor_parallel"])
        assert future.called_workers == [0, 1, 2, 3] and group.get_all_worker_results(future) == of_rows
        for dummies, called in ((False, [0, 2]), (True, [0, 1, 2, 3])):
            future = sharded(**rows, make_dummy_calls_to_free_axes=dummies)
            assert future.called_workers == called and future.get_results(group) == of_rows
        assert ray.get(future.futures[1]) == ("hi", 1, (), {"data": None})
        nested = sharded(data=[["a", "b"], ["c", "d"]], in_sharded_axes=["data_parallel", "tensor_parallel"])
        assert [kwargs["data"] for *_, kwargs in nested.get_results(group)] == ["a", "b", "c", "d"]
        for axes in (["pipeline"], ["data_parallel", "data_parallel"]):
            with pytest.raises(ValueError, match="unknown"):
                sharded(data=["a"], in_sharded_axes=axes)


def test_more_than_there_is_gives_the_difference(ray_local: None) -> None:
    told = r"(?s)node 0: 20 CPU.*: 8 CPU \(\d CPU free\).*missing: 12 CPU"
    with pytest.raises(ResourceInsufficientError, match=told):
        RayVirtualCluster([10], use_gpus=False, max_colocated_worker_groups=2).bundles()
    with pytest.raises(ResourceInsufficientError, match=r"(?s)2 GPU.*: 0 GPU.*missing: 2 GPU.*_cpu.yaml"):
        RayVirtualCluster([2]).bundles()
    with pytest.raises(ResourceInsufficientError, match=r"2 nodes asked for, and .* has 1: .*cluster.num_nodes=1"):
        RayVirtualCluster([1, 1], use_gpus=False, distinct_nodes=True).bundles()
    with pytest.raises(ValueError, match="9 bundles asked for on a node of 8 GPUs"):
        RayVirtualCluster([9])


@named(
    "counts, distinct, found",
    {
        "different": ([2, 3], True, ["a", "b"]),
        "one for both": ([2, 2], False, ["b", "b"]),
        "too few": ([1, 1, 1], True, None),
    },
)
def test_nodes_are_different_ones_and_the_emptiest_first(
    counts: list[int], distinct: bool, found: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [(name, f"ip of {name}", {"CPU": 8.0}, {"CPU": free}) for name, free in (("a", 4.0), ("b", 8.0))]
    monkeypatch.setattr(virtual_cluster, "_nodes", lambda: copy.deepcopy(nodes))
    assert virtual_cluster._fit(counts, {"CPU": 2.0}, distinct) == found


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_conflicting_versions_side_by_side(ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace(', "six==0.0.0.1"', ""))
    try:
        pythons = [python_executable_for(extra, tmp_path) for extra in ("old", "new")]
    except VenvBuildError as error:
        if "could not reach the package index" not in str(error):
            raise
        pytest.skip(f"no package index: {error}")
    for packages in tmp_path.glob("venvs/*/lib/python*/site-packages"):
        # Ray and this library are those of the tests. The extra's own packages come first on sys.path.
        (packages / "driver.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    with (
        RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, ECHO, name_prefix="old", py_executable=pythons[0]) as old,
        RayWorkerGroup(cluster, ECHO, name_prefix="new", py_executable=pythons[1]) as new,
    ):
        versions = [group.call_one(0, EchoWorker.apply, lambda: __import__("six").__version__) for group in (old, new)]
        assert versions == ["1.16.0", "1.17.0"]


LOW_ON_MEMORY = """
from nemo_rl.distributed.errors import WorkerDied
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_local_ray
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from tests.unit.distributed.conftest import ECHO
from tests.unit.distributed.workers import EchoWorker
start_local_ray(num_cpus=2, object_store_gb=0.1, forks_workers=False)
with RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1, name="low") as cluster:
    try:
        with RayWorkerGroup(cluster, ECHO, name_prefix="policy") as group:
            group.call_all(EchoWorker.sleep_on, 0, 60)
    except WorkerDied as error:
        print(error)
"""


@pytest.mark.slow
def test_a_worker_that_ray_kills_for_want_of_memory_has_died_and_the_message_has_the_figures() -> None:
    """Ray reports it with another exception than any other death."""
    low = os.environ | {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run([sys.executable, "-c", LOW_ON_MEMORY], env=low, capture_output=True, text=True)
    told = r"policy-0 \(rank 0.*\) died in .+: Ray killed it, because its machine ran low on memory: \S+GB used / \S+GB"
    assert re.search(told, done.stdout), done.stdout + done.stderr[-2000:]
    assert re.search(r"^\d+\t\d+\.\d+\t\S+", done.stdout, re.M), done.stdout
