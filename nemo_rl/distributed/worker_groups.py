"""Worker groups: one plain class in many processes, called as one.

A call to N workers costs O(N). If a worker raises, dies or hangs, the call ends with one exception that names the
actor, its rank and the method.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_rl.distributed.actor_host import HostIdentity, Method, actor_class
from nemo_rl.distributed.errors import (
    ACTOR_DEATHS,
    RayLost,
    WorkerCallError,
    WorkerDied,
    WorkerError,
    WorkerHang,
    death_text,
)
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import Bundle, RayVirtualCluster, await_lost_nodes, ray_loss

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 900.0
_POLL_S = 0.5
_MESSAGE_EVERY_S = 60.0
_INSPECT_S = 5.0
_ON_NODE_S = 15.0
_EXIT_S = 3.0
_DEATH_S = 3.0  # in which Ray notices that a process has ended
_LEAST_PULSE_S = 10.0  # a process that loads libraries on a busy machine may be mute for seconds
_MAX_STACKS = 4  # the other late workers mostly wait in the same collective
_LOG_TAIL_LINES = 20

LIVE: list[RayWorkerGroup] = []
"""The groups whose workers run; `meters` measures all of them."""


class RayWorkerBuilder:
    """A worker class by its full name, and the arguments of its constructor, the same for every rank.

    Only the worker's own environment imports the class. ObjectRefs among the arguments arrive as their values.
    """

    def __init__(self, worker_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.worker_class_fqn, self.args, self.kwargs = worker_class_fqn, args, kwargs


@dataclass(frozen=True)
class MultiWorkerFuture:
    """The calls of `run_all_workers_sharded_data`: refs, the workers called, and whose results are wanted."""

    futures: list[ray.ObjectRef]
    called_workers: list[int]
    return_from_workers: list[int]

    def get_results(self, worker_group: RayWorkerGroup) -> list[Any]:
        """Wait for all calls. The results of `return_from_workers`, by rank."""
        results = dict(zip(self.called_workers, worker_group.wait(self.futures), strict=True))
        return [results[rank] for rank in self.return_from_workers]


@dataclass(kw_only=True)
class Worker:
    """The controller's view of one worker."""

    rank: int
    name: str
    bundles: list[Bundle]
    handle: Any  # ray.actor.ActorHandle of an ActorHost
    identity: HostIdentity | None = None  # None until its process runs

    def __str__(self) -> str:
        if self.identity is None:
            return f"{self.name} (rank {self.rank}, node {self.bundles[0].node_ip})"
        return f"{self.name} (rank {self.rank}, node {self.identity.node_ip}, pid {self.identity.pid})"


class _Call(NamedTuple):
    worker: Worker
    method: str

    @property
    def names(self) -> dict[str, Any]:
        """Arguments of a `WorkerError`."""
        return {"worker": self.worker.name, "rank": self.worker.rank, "method": self.method}


class RayWorkerGroup:
    """Workers of one class, one on each bundle of a cluster, or one on each group of bundles.

    `bundle_groups[r]` lists the bundles of rank r. The worker runs on the first of them and sees the GPUs of all.
    Default: one bundle each, the first `num_workers` of the cluster. Several worker groups share a bundle, up to the
    cluster's `max_colocated_worker_groups`.

    Each worker finds RANK, WORLD_SIZE, LOCAL_RANK (its position among the group's workers on its node), NODE_RANK,
    MASTER_ADDR and MASTER_PORT in its environment. CUDA_VISIBLE_DEVICES names exactly the GPUs of its bundles, so its
    first device always has index 0. A worker joins its peers with
    `nemo_rl.distributed.collectives.init_process_group`. Rank 0 holds the port, so no other process can bind it.

    Workers get only the environment variables in `env_vars`. `py_executable` is the Python that runs the workers (see
    `nemo_rl.utils.venvs`). `timeout_s` limits every wait without a limit of its own; None: no limit.

    As scripts written for NeMo RL say it: `workers_per_node` is the number of workers on every node or on each,
    `bundle_indices_list` a (node, its bundles) for each worker, `sharding_annotations` is `sharding`.

    If the start fails, all actors end, and the error names the worker and the reason.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        *,
        name_prefix: str = "worker",
        num_workers: int | None = None,
        bundle_groups: Sequence[Sequence[int]] | None = None,
        sharding: NamedSharding | None = None,
        workers_per_node: int | Sequence[int] | None = None,
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        py_executable: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.name_prefix = name_prefix
        self.timeout_s = timeout_s
        self.on_wait: Callable[[], None] | None = None  # called about twice a second while a wait lasts
        self.controller_tensor_bytes = 0
        self._cluster = cluster
        self.members: list[Worker] = []  # by rank
        self._calls: dict[Any, _Call] = {}  # task id -> call that `wait` has not returned yet
        self._is_lost = False  # a worker has died, or did not answer in time
        if workers_per_node is not None or bundle_indices_list is not None:
            bundle_groups = _groups_by_node(cluster.bundles_by_node(), workers_per_node, bundle_indices_list)
        groups = _bundle_groups(cluster, num_workers, bundle_groups)
        sharding = sharding if sharding_annotations is None else sharding_annotations
        if sharding is not None and sharding.size != len(groups):
            raise ValueError(f"{name_prefix}: the sharding has {sharding.size} ranks for {len(groups)} workers")
        self.sharding = sharding
        try:
            node_of = {index: node for node, members in enumerate(cluster.bundles_by_node()) for index in members}
            spans_nodes = any(len({node_of[index] for index in group}) > 1 for group in groups)
            bundles = cluster.bundles(spanning_nodes=spans_nodes)
            cluster.take_seats([index for group in groups for index in group], name_prefix)
            places = [[bundles[index] for index in group] for group in groups]
            await_lost_nodes()
            self._spawn(places, remote_worker_builder, env_vars, py_executable)
            self._start(start_timeout_s)
        except BaseException:
            self._end(failed=True)
            raise
        LIVE.append(self)

    @property
    def workers(self) -> list[Any]:
        """Actor handles by rank, for `call_worker` in other processes."""
        return [worker.handle for worker in self.members]

    @property
    def world_size(self) -> int:
        return len(self.members)

    # Calls of a method that is named as code, `PolicyWorkerInterface.train`: of the worker's class, or of an interface
    # if importing that class needs what this process lacks. A start_ method returns refs for `wait`; a call_ method
    # waits for the results itself.

    def start_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[ray.ObjectRef[R]]:
        """Call `method` on every worker with the same arguments."""
        return [self._submit(worker, method.__name__, args, kwargs) for worker in self.members]

    def start_one[**P, R](
        self, index: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> ray.ObjectRef[R]:
        """Call `method` on worker number `index`."""
        return self._submit(self.members[index], method.__name__, args, kwargs)

    def call_all[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`start_all` and `wait`: the result of each worker, by rank."""
        return self.wait(self.start_all(method, *args, **kwargs))

    def call_each[R](self, method: Method[..., R], args_by_worker: Sequence[tuple[Any, ...]], **common: Any) -> list[R]:
        """`call_all` with the positional arguments `args_by_worker[i]` for worker i, and the keywords `common`."""
        name, given = f"{self.name_prefix}.{method.__name__}", len(args_by_worker)
        if given != len(self.members):
            raise ValueError(f"{name}: {given} sets of arguments for {len(self.members)} workers")
        if not all(isinstance(args, tuple) for args in args_by_worker):
            raise ValueError(f"{name}: give each worker a tuple of arguments, e.g. [(a,), (b,)]")
        return self.wait([self.start_one(rank, method, *args, **common) for rank, args in enumerate(args_by_worker)])

    def call_one[**P, R](self, index: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`start_one` and `wait`: the result."""
        return self.wait([self.start_one(index, method, *args, **kwargs)])[0]

    # The same calls by the method's name, with only keyword arguments, as scripts written for NeMo RL make them.

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **kwargs: Any) -> ray.ObjectRef:
        """`start_one`."""
        return self._submit(self.members[worker_idx], method_name, (), kwargs)

    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Sequence[str] = (), **kwargs: Any
    ) -> list[ray.ObjectRef]:
        """`start_all`, but only of the workers at 0 on `run_rank_0_only_axes`."""
        ranks = self._first_on(run_rank_0_only_axes)
        return [self.run_single_worker_single_data(method_name, rank, **kwargs) for rank in ranks]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] = (),
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ray.ObjectRef]:
        """Each worker gets its own item of every list in `kwargs`, and all of `common_kwargs`."""
        ranks = self._first_on(run_rank_0_only_axes)
        name = f"{self.name_prefix}.{method_name}"
        if wrong := {key: len(items) for key, items in kwargs.items() if len(items) != len(ranks)}:
            raise ValueError(f"{name}: items for {wrong}, and {len(ranks)} workers are called")
        each = [{key: items[i] for key, items in kwargs.items()} for i in range(len(ranks))]
        pairs, common = zip(ranks, each, strict=True), common_kwargs or {}
        return [self.run_single_worker_single_data(method_name, rank, **own, **common) for rank, own in pairs]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Each worker gets the entry of nested lists at its coordinates on `in_sharded_axes`.

        Those that differ only on `replicate_on_axes` get the same. On the other axes only the worker at 0 is called, or
        all others with None (`make_dummy_calls_to_free_axes`). Results are of the workers at 0 on
        `output_is_replicated`. Group with a `sharding` only. Raises ValueError for an axis that does not exist or is
        named twice.
        """
        sharding = self._sharding()
        named = [*in_sharded_axes, *replicate_on_axes]
        unknown = {*named, *output_is_replicated} - {*sharding.names}
        if unknown or len(set(named)) < len(named):
            raise ValueError(f"axes {[*sharding.names]}: unknown {sorted(unknown)}, or one named twice in {named}")
        refs, called, wanted = [], [], []
        for rank in range(self.world_size):
            at = sharding.get_worker_coords(rank)
            is_meant = all(at[axis] == 0 for axis in sharding.names if axis not in named)
            if not is_meant and not make_dummy_calls_to_free_axes:
                continue
            given: dict[str, Any] = kwargs if is_meant else dict.fromkeys(kwargs)
            for axis in in_sharded_axes if is_meant else ():
                given = {name: entries[at[axis]] for name, entries in given.items()}
            refs.append(self.run_single_worker_single_data(method_name, rank, **given, **(common_kwargs or {})))
            called.append(rank)
            if is_meant and all(at[axis] == 0 for axis in output_is_replicated):
                wanted.append(rank)
        return MultiWorkerFuture(refs, called, wanted)

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        return future.get_results(self)

    def _first_on(self, axes: Sequence[str]) -> list[int]:
        """Ranks whose coordinates on `axes` are 0."""
        if not axes:
            return list(range(self.world_size))
        return self._sharding().get_ranks_by_coord(**dict.fromkeys(axes, 0))

    def _sharding(self) -> NamedSharding:
        if self.sharding is None:
            raise ValueError(f"{self.name_prefix} has no axes; give the group a sharding")
        return self.sharding

    def wait[R](self, refs: Sequence[ray.ObjectRef[R]], timeout_s: float | None = None) -> list[R]:
        """Results of calls started on this group, in the order of `refs`. `timeout_s` None: the group's own limit.

        The first worker that fails ends the wait, as the others may be stuck in a collective with it.

        Raises:
            WorkerError: if a worker raised.
            WorkerDied: if its process is gone.
            WorkerHang: if the time is up; the message holds the stacks of the late workers.
        """
        calls = {ref: self._calls.pop(ref.task_id()) for ref in refs}
        results = self._wait(calls, timeout_s if timeout_s is not None else self.timeout_s)
        self.controller_tensor_bytes += sum(tensor_bytes(result) for result in results.values())
        return [results[ref] for ref in refs]

    def wait_any(self, refs: Sequence[ray.ObjectRef], timeout_s: float | None = None) -> list[ray.ObjectRef]:
        """The calls among `refs` that are done, at least one, for `wait`. Raises WorkerHang if none is in time."""
        limit = timeout_s if timeout_s is not None else self.timeout_s
        if not ray.wait(list(refs), timeout=limit)[0]:
            assert limit is not None
            raise self._hang([self._calls[ref.task_id()] for ref in refs], limit)
        return self.done(refs)

    def done(self, refs: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """The calls among `refs` for which `wait` would return, or raise, immediately."""
        return ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []

    def profile(self, names: Collection[str], path: str | None = None) -> None:
        """Begin to profile the workers of these names, or end it and write `<path>_<worker>.json.gz`."""
        named = [worker for worker in self.members if worker.name in names]
        files = [f"{path}_{worker.name}.json.gz" if path is not None else None for worker in named]
        refs = [worker.handle.profile.remote(file) for worker, file in zip(named, files, strict=True)]
        self._wait({ref: _Call(worker, "profile") for ref, worker in zip(refs, named, strict=True)}, self.timeout_s)

    def shutdown(self, method: Method[[], Any] | None = None, grace_s: float = 10.0) -> None:
        """End all workers and free their bundles. May be called again.

        `method`, if given, is called first and has `grace_s` seconds to finish, unless a worker has died or hung: the
        others may wait for it.
        """
        is_lost = self._is_lost or not ray.is_initialized() or ray_loss() is not None
        if method is not None and self.members and not is_lost:
            try:
                self.wait(self.start_all(method), grace_s)
            except WorkerError as error:
                logger.warning("%s did not end cleanly and is killed: %s", self.name_prefix, error)
        self._end(failed=False)

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _spawn(
        self,
        bundles_by_rank: list[list[Bundle]],
        builder: RayWorkerBuilder,
        env_vars: Mapping[str, str] | None,
        py_executable: str | None,
    ) -> None:
        runtime_env: dict[str, Any] = {"env_vars": dict(env_vars or {})}
        if py_executable is not None:
            # Without the file Ray would retry for ever. The files of other nodes cannot be checked from here.
            here = ray.get_runtime_context().get_node_id()
            if any(bundles[0].node_id == here for bundles in bundles_by_rank) and shutil.which(py_executable) is None:
                raise ValueError(f"py_executable {py_executable} does not exist or cannot be run on this node")
            runtime_env["py_executable"] = py_executable
        remote = actor_class()
        for rank, bundles in enumerate(bundles_by_rank):
            name = f"{self.name_prefix}-{rank}"
            handle = remote.options(
                # One of the bundle's worker slots. The placement group books its GPUs and `_start` names them.
                num_cpus=1,
                num_gpus=0,
                runtime_env=runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundles[0].placement_group,
                    placement_group_bundle_index=bundles[0].placement_group_bundle_index,
                ),
            ).remote(builder.worker_class_fqn, builder.args, builder.kwargs)
            self.members.append(Worker(rank=rank, name=name, bundles=bundles, handle=handle))

    def _start(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def wait(calls: dict[ray.ObjectRef, _Call]) -> dict[ray.ObjectRef, Any]:
            return self._wait(calls, max(1.0, deadline - time.monotonic()))

        calls = {w.handle.identity.remote(): _Call(w, "start of its process") for w in self.members}
        for ref, identity in wait(calls).items():
            calls[ref].worker.identity = identity
        self.on_wait = self._watch_pulses()
        first = self.members[0]
        # Not from the bundles: Ray moves those of a node that is lost to the node that takes its place.
        identities = [worker.identity for worker in self.members if worker.identity is not None]
        one_node = len({identity.node_id for identity in identities}) == 1
        address = "127.0.0.1" if one_node else identities[0].node_ip
        ref = first.handle.reserve_port.remote(address)
        [port] = wait({ref: _Call(first, "reserve_port")}).values()
        local_ranks: Counter[int] = Counter()  # of each node the next one
        starts = {}
        for worker in self.members:
            node_rank = worker.bundles[0].node_rank
            env = {
                "RANK": str(worker.rank),
                "WORLD_SIZE": str(len(self.members)),
                "LOCAL_RANK": str(local_ranks[node_rank]),
                "NODE_RANK": str(node_rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": ",".join(b.gpu_id for b in worker.bundles if b.gpu_id is not None),
            }
            local_ranks[node_rank] += 1
            starts[worker.handle.start.remote(env)] = _Call(worker, "__init__")
        wait(starts)
        self.on_wait = None

    def _watch_pulses(self) -> Callable[[], None]:
        """A function that raises WorkerHang once a process has answered no question for `timeout_s`.

        A constructor may take longer than a call (it may load a model for minutes), but its process answers meanwhile.
        """
        limit = max(self.timeout_s, _LEAST_PULSE_S) if self.timeout_s is not None else math.inf
        last = {w.rank: (w.handle.phase.remote(), time.monotonic()) for w in self.members}

        def look() -> None:
            refs = [ref for ref, _ in last.values()]
            answered = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            now = time.monotonic()
            for worker in self.members:
                ref, asked = last[worker.rank]
                if ref in answered:
                    last[worker.rank] = worker.handle.phase.remote(), now
                elif now - asked > limit:
                    raise self._hang([_Call(worker, "__init__")], limit)

        return look

    def _submit(self, worker: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ray.ObjectRef:
        self.controller_tensor_bytes += tensor_bytes((args, kwargs))
        ref = worker.handle.call.remote(method, *args, **kwargs)
        self._calls[ref.task_id()] = _Call(worker, method)
        return ref

    def _wait(self, calls: dict[ray.ObjectRef, _Call], timeout_s: float | None) -> dict[ray.ObjectRef, Any]:
        started = time.monotonic()
        next_message = started + _MESSAGE_EVERY_S
        results: dict[ray.ObjectRef, Any] = {}
        pending = list(calls)
        while pending:
            now = time.monotonic()
            if timeout_s is not None and now - started > timeout_s:
                raise self._hang([calls[ref] for ref in pending], timeout_s)
            if now > next_message:
                late = ", ".join(calls[ref].worker.name for ref in pending[:8])
                logger.info("Waiting %.0f s for %s of %s", now - started, calls[pending[0]].method, late)
                next_message = now + _MESSAGE_EVERY_S
            if self.on_wait is not None:
                self.on_wait()
            # All at once and with a short limit: waiting for one after another would cost O(N^2).
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
            try:
                results |= {ref: _get(ref, calls[ref]) for ref in ready}
            except WorkerError as error:
                others = {ref: call for ref, call in calls.items() if call.worker.rank != error.rank}
                death = error if isinstance(error, WorkerDied) else _death_among(others)
                self._is_lost |= death is not None
                raise death or error from None
        return results

    def _hang(self, late: list[_Call], timeout_s: float) -> WorkerHang:
        self._is_lost = True
        first = late[0]
        workers = list({call.worker.rank: call.worker for call in late}.values())  # each once, whatever it was asked
        text = f"no answer from {', '.join(map(str, workers))} in {first.method} after {timeout_s:.3g} s"
        if (loss := ray_loss()) is not None:
            raise RayLost(f"{text}: {loss}")
        return WorkerHang(f"{text}\n{_inspect(workers)}", **first.names)

    def _end(self, *, failed: bool) -> None:
        members, self.members, self._calls = self.members, [], {}
        if self in LIVE:
            LIVE.remove(self)
        if ray.is_initialized():
            for worker in members:
                ray.kill(worker.handle, no_restart=True)
            _wait_for_exit(members)
        self._cluster.leave_seats(self.name_prefix, failed=failed)


def start_groups(count: int, start: Callable[[int], RayWorkerGroup]) -> list[RayWorkerGroup]:
    """`start(0)` to `start(count - 1)` in parallel. If one fails, the others end and its error is raised."""
    with ThreadPoolExecutor(max_workers=count) as threads:
        starts = [threads.submit(start, index) for index in range(count)]
    failures = [error for future in starts if (error := future.exception()) is not None]
    if failures:
        for future in starts:
            if future.exception() is None:
                future.result().shutdown()
        raise failures[0]
    return [future.result() for future in starts]


def wait_groups[R](groups: Sequence[RayWorkerGroup], refs: Sequence[ray.ObjectRef[R]]) -> list[R]:
    """Results of one call on each group, in order. The first failure ends the wait, with the errors of `wait`."""
    pending = dict(zip(refs, groups, strict=True))
    started = time.monotonic()
    results: dict[ray.ObjectRef[R], R] = {}
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_POLL_S)
        for ref in ready:
            results[ref] = pending.pop(ref).wait([ref])[0]
        if ready:
            continue
        for ref, group in pending.items():
            if group.timeout_s is not None and time.monotonic() - started > group.timeout_s:
                raise group._hang([group._calls.pop(ref.task_id())], group.timeout_s)
    return [results[ref] for ref in refs]


def _bundle_groups(
    cluster: RayVirtualCluster, num_workers: int | None, bundle_groups: Sequence[Sequence[int]] | None
) -> list[list[int]]:
    available = cluster.world_size()
    if bundle_groups is None:
        count = available if num_workers is None else num_workers
        if not 1 <= count <= available:
            raise ValueError(f"{count} workers asked for on a cluster of {available} bundles")
        return [[index] for index in range(count)]
    groups = [list(group) for group in bundle_groups]
    flat = [index for group in groups for index in group]
    assert num_workers is None, "bundle_groups says how many workers there are"
    if not groups or not all(groups) or len(set(flat)) != len(flat):
        raise ValueError(f"every worker needs bundles of its own, got {groups}")
    if min(flat) < 0 or max(flat) >= available:
        raise ValueError(f"bundles {groups} asked for on a cluster of {available} bundles")
    return groups


def _groups_by_node(
    nodes: Sequence[Sequence[int]],
    workers_per_node: int | Sequence[int] | None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None,
) -> list[list[int]]:
    """`bundle_groups` for bundles that are counted on each node, from 0. `nodes[n]` has the bundles of node n."""
    counts = [workers_per_node] * len(nodes) if isinstance(workers_per_node, int) else workers_per_node
    if bundle_indices_list is None:
        bundle_indices_list = [(node, [local]) for node, count in enumerate(counts or ()) for local in range(count)]
    for node, local in bundle_indices_list:
        if not 0 <= node < len(nodes) or not all(0 <= index < len(nodes[node]) for index in local):
            sizes = [len(bundles) for bundles in nodes]
            raise ValueError(f"bundles {[*local]} of node {node} asked for, and the nodes have {sizes} bundles")
    return [[nodes[node][index] for index in local] for node, local in bundle_indices_list]


def tensor_bytes(value: Any) -> int:
    """Bytes of the torch and numpy arrays in `value`, including nested dataclasses, mappings, lists, tuples and sets.

    An ObjectRef counts as 0 bytes, since its value does not travel.
    """
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        parts = _parts_of(type(item))
        if parts is None:
            continue
        if parts == "nbytes":
            total += item.nbytes
        elif parts == "values":
            pending.extend(item.values())
        elif parts == "items":
            pending.extend(item)
        else:
            pending.extend([getattr(item, name) for name in parts])
    return total


@cache
def _parts_of(kind: type) -> Literal["nbytes", "values", "items"] | tuple[str, ...] | None:
    """How to look into a value of this type: at its bytes, its values, its items, or at fields by name."""
    torch = sys.modules.get("torch")  # if the process has not imported torch, it holds no tensor
    if issubclass(kind, np.ndarray) or (torch is not None and issubclass(kind, torch.Tensor)):
        return "nbytes"
    if issubclass(kind, Mapping):
        return "values"
    if issubclass(kind, list | tuple | set | frozenset):
        return "items"
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


# -- failures, and reports of late or dead workers; each question has its own time limit


def _get(ref: ray.ObjectRef, call: _Call) -> Any:
    worker, method = call
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, WorkerCallError):
            raise WorkerError(f"{worker} failed in {method}: {error}", **call.names) from None
        text = "\n".join(filter(None, [f"{worker} failed in {method}: {cause}", cause.remote_traceback]))
        kind, remote = cause.exception_type, cause.remote_traceback
        raise WorkerError(text, **call.names, exception_type=kind, remote_traceback=remote) from None
    except ACTOR_DEATHS as error:
        if (loss := ray_loss()) is not None:
            raise RayLost(f"{worker} died in {method}: {loss}") from None
        raise WorkerDied(f"{worker} died in {method}: {death_text(error)}{_log_tail(worker)}", **call.names) from None


def _death_among(calls: Mapping[ray.ObjectRef, _Call]) -> WorkerDied | None:
    """The death of a worker, which its peers in a collective may report first, as an error of their connection."""
    deadline, pending = time.monotonic() + _DEATH_S, list(calls)
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, timeout=_POLL_S)
        for ref in ready:
            try:
                _get(ref, calls[ref])
            except WorkerDied as death:
                return death
            except WorkerError:
                continue
    return None


def _inspect(workers: list[Worker]) -> str:
    """Phase and Python stacks of workers, one paragraph each, or the state of a process that does not answer."""
    phases = {worker.rank: worker.handle.phase.remote() for worker in workers}
    stacks = {worker.rank: worker.handle.stack.remote() for worker in workers[:_MAX_STACKS]}
    refs = [*phases.values(), *stacks.values()]
    answered = set(ray.wait(refs, num_returns=len(refs), timeout=_INSPECT_S)[0])
    parts = []
    for worker in workers:
        try:
            if phases[worker.rank] not in answered:
                parts.append(f"--- {worker}: {_process_report(worker)}")
                continue
            parts.append(f"--- {worker}: {ray.get(phases[worker.rank])}")
            if stacks.get(worker.rank) in answered:
                parts.append(ray.get(stacks[worker.rank]))
        except RayError as error:
            parts.append(f"--- {worker}: {error}")
    return "\n".join(parts)


def _process_report(worker: Worker) -> str:
    if worker.identity is None:
        return (
            f"its process has not started (asked for {_INSPECT_S:g} s): its Python environment may be missing or "
            "still be created, or its node may be out of reach"
        )
    state = _on_node(worker.identity, _process_state, worker.identity.pid)
    return (
        f"its process answers nothing within {_INSPECT_S:g} s, so there is no stack; "
        f"state of process {worker.identity.pid}: {state or 'unknown, its node does not answer'}"
    )


def _log_tail(worker: Worker) -> str:
    """The last lines that the worker wrote to stderr, ready to append to a message; "" if there are none."""
    if worker.identity is None or worker.identity.log_path is None:
        return ""
    tail = _on_node(worker.identity, _read_tail, worker.identity.log_path)
    return f"\nlast lines of {worker.identity.log_path}:\n{tail}" if tail else ""


def _on_node(identity: HostIdentity, function: Callable[[Any], str], argument: Any) -> str:
    """`function(argument)` on the worker's node; "" if that node does not answer either."""
    if identity.node_id == ray.get_runtime_context().get_node_id():
        return function(argument)
    strategy = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    try:
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
        return ray.get(remote.options(scheduling_strategy=strategy).remote(argument), timeout=_ON_NODE_S)
    except RayError:
        return ""


def _read_tail(path: str) -> str:
    if not Path(path).is_file():
        return ""
    with open(path, errors="replace") as file:
        return "".join(deque(file, maxlen=_LOG_TAIL_LINES)).rstrip()


def _process_state(pid: int) -> str:
    """The state as the kernel names it, e.g. "T (stopped)"."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return "gone"
    return next(line.split(":", 1)[1].strip() for line in status.read_text().splitlines() if line.startswith("State:"))


def _wait_for_exit(members: list[Worker]) -> None:
    """Wait until the processes on this node are gone, so that their GPU memory and ports are free."""
    here = ray.get_runtime_context().get_node_id()
    pids = [w.identity.pid for w in members if w.identity is not None and w.identity.node_id == here]
    # A stopped process does not receive Ray's request to end, and a busy one may take long. Without Ray none gets it.
    for last_resort in (True, False):
        deadline = time.monotonic() + _EXIT_S * (not last_resort or ray_loss() is None)
        while (pids := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in pids if last_resort else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if pids:
        logger.warning("processes %s still run after they were killed", pids)


class SeesFiles(Protocol):
    """A worker that says whether a file exists on its node."""

    def sees(self, file: Path) -> bool: ...


def require_shared(group: RayWorkerGroup, folder: Path, key: str) -> None:
    """Raise ValueError, which names `key`, unless every worker, which `SeesFiles`, finds a file of `folder`."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".do_all_nodes_see_this_") as file:
        seen = group.call_all(SeesFiles.sees, Path(file.name))
    blind = {worker.bundles[0].node_ip for worker, sees in zip(group.members, seen, strict=True) if not sees}
    if blind:
        raise ValueError(
            f"{key}: the nodes {', '.join(sorted(blind))} do not see the files in {folder}: name a folder on a file "
            "system that all nodes share"
        )
