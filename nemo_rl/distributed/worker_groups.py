"""Worker groups: one plain class, many processes, called as one.

A call to N workers costs O(N). Whatever a worker does wrong - raise, die, hang - ends the call with one exception that
names the actor, its rank and the method.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.actor_host import HostIdentity, actor_class
from nemo_rl.distributed.diagnosis import inspect_workers, log_tail
from nemo_rl.distributed.errors import WorkerCallError, WorkerDied, WorkerError, WorkerHang
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import Bundle, RayVirtualCluster

# -- How many bytes of arrays an object carries.


def tensor_bytes(value: Any) -> int:
    """Bytes of the torch and numpy arrays in `value`, looked for in dataclasses, mappings, lists, tuples and sets.

    An ObjectRef counts nothing: what it stands for stays where it is.
    """
    # Without torch in the process there is no tensor in it either.
    torch = sys.modules.get("torch")
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, np.ndarray):
            total += item.nbytes
        elif torch is not None and isinstance(item, torch.Tensor):
            total += item.element_size() * item.nelement()
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, field.name) for field in dataclasses.fields(item))
    return total


logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 900.0
_POLL_S = 0.5
_MESSAGE_EVERY_S = 60.0
_INSPECT_S = 5.0
_EXIT_S = 3.0


class RayWorkerBuilder:
    """A worker class by its full name, and the arguments of its constructor, the same for every rank.

    The class is imported in the worker's own environment alone. ObjectRefs among the arguments arrive as their values.
    """

    def __init__(self, worker_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.worker_class_fqn = worker_class_fqn
        self.args = args
        self.kwargs = kwargs


@dataclass(kw_only=True)
class Worker:
    """The controller's view of one worker."""

    rank: int
    name: str
    bundles: list[Bundle]
    handle: Any  # ray.actor.ActorHandle of an ActorHost
    identity: HostIdentity | None = None  # None until its process runs

    def __str__(self) -> str:
        where = f"node {self.bundles[0].node_ip}"
        if self.identity is not None:
            where += f", pid {self.identity.pid}"
        return f"{self.name} (rank {self.rank}, {where})"


@dataclass(kw_only=True)
class _Call:
    worker: Worker
    method: str


class RayWorkerGroup:
    """Workers of one class, one on each bundle of a cluster - or one on each group of bundles.

    `bundle_groups[r]` lists the bundles of rank r; the worker runs on the first and sees the GPUs of all. Default: one
    bundle each, the first `num_workers` of the cluster. Several groups share a bundle up to the cluster's
    `max_colocated_worker_groups`.

    Each worker finds RANK, WORLD_SIZE, LOCAL_RANK (position among the group's workers on its node), NODE_RANK,
    MASTER_ADDR and MASTER_PORT in its environment, and CUDA_VISIBLE_DEVICES with exactly the GPUs of its bundles, so
    that its first device is always index 0. It joins its peers with
    `nemo_rl.distributed.collectives.init_process_group`; the port is held by rank 0 and cannot be bound a second time.

    Of environment variables only `env_vars` are passed. `py_executable` is the path of the Python that runs the workers
    (see `nemo_rl.utils.venvs`). `timeout_s` limits every wait that gives no limit of its own; None waits for ever.

    When the start fails, every actor is ended and the error says which and why.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        *,
        name_prefix: str,
        num_workers: int | None = None,
        bundle_groups: Sequence[Sequence[int]] | None = None,
        sharding: NamedSharding | None = None,
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
        self._members: list[Worker] = []
        self._calls: dict[Any, _Call] = {}  # task id -> call, until it has been waited for
        groups = _bundle_groups(cluster, num_workers, bundle_groups)
        if sharding is not None and sharding.size != len(groups):
            raise ValueError(f"{name_prefix}: the sharding has {sharding.size} ranks for {len(groups)} workers")
        self.sharding = sharding
        try:
            nodes = [{index: node for node, members in enumerate(cluster.bundles_by_node()) for index in members}]
            spanning = any(len({nodes[0][index] for index in group}) > 1 for group in groups)
            bundles = cluster.bundles(spanning_nodes=spanning)
            cluster.take_seats([index for group in groups for index in group], name_prefix)
            self._spawn(
                [[bundles[index] for index in group] for group in groups], builder, env_vars or {}, py_executable
            )
            self._start(start_timeout_s)
        except BaseException:
            self._end(failed=True)
            raise

    @property
    def workers(self) -> list[Any]:
        """Actor handles by rank: `await handle.call.remote("method", ...)` from inside another actor."""
        return [worker.handle for worker in self._members]

    @property
    def members(self) -> list[Worker]:
        """The workers with their names, bundles, nodes and process ids, by rank."""
        return list(self._members)

    @property
    def world_size(self) -> int:
        return len(self._members)

    # Calls. Each start_ method returns refs for `wait`; each call_ method is start and wait in one.

    def start_all(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Call `method` on every worker with the same arguments."""
        return [self._submit(worker, method, args, kwargs) for worker in self._members]

    def start_each(self, method: str, args_by_worker: Sequence[tuple[Any, ...]], **common: Any) -> list[ray.ObjectRef]:
        """Call `method` on worker i with the positional arguments `args_by_worker[i]` and the keywords `common`."""
        if len(args_by_worker) != len(self._members):
            raise ValueError(
                f"{self.name_prefix}.{method}: {len(args_by_worker)} sets of arguments for {len(self._members)} workers"
            )
        for args in args_by_worker:
            if not isinstance(args, tuple):
                raise ValueError(
                    f"{self.name_prefix}.{method}: give each worker a tuple of arguments, e.g. [(a,), (b,)]"
                )
        return [
            self._submit(worker, method, args, common)
            for worker, args in zip(self._members, args_by_worker, strict=True)
        ]

    def start_one(self, index: int, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Call `method` on worker number `index`."""
        return self._submit(self._members[index], method, args, kwargs)

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """`start_all` and `wait`: the result of each worker, by rank."""
        return self.wait(self.start_all(method, *args, **kwargs), timeout_s)

    def call_each(
        self, method: str, args_by_worker: Sequence[tuple[Any, ...]], *, timeout_s: float | None = None, **common: Any
    ) -> list[Any]:
        """`start_each` and `wait`: the result of each worker, by rank."""
        return self.wait(self.start_each(method, args_by_worker, **common), timeout_s)

    def call_one(self, index: int, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """`start_one` and `wait`: the result."""
        return self.wait([self.start_one(index, method, *args, **kwargs)], timeout_s)[0]

    def wait(self, refs: Sequence[ray.ObjectRef], timeout_s: float | None = None) -> list[Any]:
        """Results of calls started on this group, in the order of `refs`. `timeout_s` None means the group's own limit.

        The first worker that fails ends the wait; the others may be stuck in a collective with it. Raises WorkerError
        when a worker raised, WorkerDied when its process is gone, WorkerHang, with the stacks of the late workers, when
        the time is up.
        """
        calls = {ref: self._calls.pop(ref.task_id()) for ref in refs}
        results = self._wait(calls, timeout_s if timeout_s is not None else self.timeout_s)
        self.controller_tensor_bytes += sum(tensor_bytes(result) for result in results.values())
        return [results[ref] for ref in refs]

    def wait_any(self, refs: Sequence[ray.ObjectRef], timeout_s: float | None = None) -> list[ray.ObjectRef]:
        """Those calls among `refs` that are done, one at least, for `wait`. Raises WorkerHang when none is in time."""
        limit = timeout_s if timeout_s is not None else self.timeout_s
        started = time.monotonic()
        while not (done := self.done(refs)):
            if limit is not None and time.monotonic() - started > limit:
                raise self._hang([self._calls[ref.task_id()] for ref in refs], limit)
            ray.wait(list(refs), num_returns=1, timeout=_POLL_S)
        return done

    def done(self, refs: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """Those calls among `refs` for which `wait` would return, or raise, at once."""
        return ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []

    def is_ready(self, refs: Sequence[ray.ObjectRef]) -> bool:
        """Whether `wait(refs)` would return, or raise, at once."""
        return not ray.wait(list(refs), num_returns=len(refs), timeout=0)[1]

    def shutdown(self, method: str | None = None, grace_s: float = 10.0) -> None:
        """End every worker and free its bundle; `method`, if given, is called first and has `grace_s` seconds to
        finish.

        May be called again.
        """
        if method is not None and self._members and ray.is_initialized():
            try:
                self.call_all(method, timeout_s=grace_s)
            except WorkerError as error:
                logger.warning("%s did not end cleanly and is killed: %s", self.name_prefix, error)
        self._end(failed=False)

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _spawn(
        self,
        places: list[list[Bundle]],
        builder: RayWorkerBuilder,
        env_vars: Mapping[str, str],
        py_executable: str | None,
    ) -> None:
        runtime_env: dict[str, Any] = {"env_vars": dict(env_vars)}
        if py_executable is not None:
            _check_python(py_executable, places)
            runtime_env["py_executable"] = py_executable
        remote = actor_class()
        for rank, bundles in enumerate(places):
            name = f"{self.name_prefix}-{rank}"
            handle = remote.options(
                # One of the bundle's worker slots; its GPUs are booked by the placement group and named by `_start`.
                num_cpus=1,
                num_gpus=0,
                runtime_env=runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundles[0].placement_group,
                    placement_group_bundle_index=bundles[0].placement_group_bundle_index,
                ),
            ).remote(builder.worker_class_fqn, builder.args, builder.kwargs, name, rank)
            self._members.append(Worker(rank=rank, name=name, bundles=bundles, handle=handle))

    def _start(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def left() -> float:
            return max(1.0, deadline - time.monotonic())

        calls = {w.handle.identity.remote(): _Call(worker=w, method="start of its process") for w in self._members}
        for ref, identity in self._wait(calls, left()).items():
            calls[ref].worker.identity = identity
        one_node = len({worker.bundles[0].node_id for worker in self._members}) == 1
        address = "127.0.0.1" if one_node else self._members[0].bundles[0].node_ip
        first = self._members[0]
        ref = first.handle.reserve_port.remote(address)
        port = self._wait({ref: _Call(worker=first, method="reserve_port")}, left())[ref]
        local_counts: dict[int, int] = {}
        starts = {}
        for worker in self._members:
            node_rank = worker.bundles[0].node_rank
            local_rank = local_counts.get(node_rank, 0)
            local_counts[node_rank] = local_rank + 1
            env = {
                "RANK": str(worker.rank),
                "WORLD_SIZE": str(len(self._members)),
                "LOCAL_RANK": str(local_rank),
                "NODE_RANK": str(node_rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": ",".join(b.gpu_id for b in worker.bundles if b.gpu_id is not None),
            }
            starts[worker.handle.start.remote(env)] = _Call(worker=worker, method="__init__")
        self._wait(starts, left())

    def _submit(self, worker: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ray.ObjectRef:
        self.controller_tensor_bytes += tensor_bytes((args, kwargs))
        ref = worker.handle.call.remote(method, *args, **kwargs)
        self._calls[ref.task_id()] = _Call(worker=worker, method=method)
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
            # All at once and with a short limit: a wait for one after another would cost O(N^2).
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
            for ref in ready:
                results[ref] = self._get(ref, calls[ref])
        return results

    def _get(self, ref: ray.ObjectRef, call: _Call) -> Any:
        worker = call.worker
        names = {"worker": worker.name, "rank": worker.rank, "method": call.method}
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, WorkerCallError):
                raise WorkerError(f"{worker} failed in {call.method}: {error}", **names) from None
            raise WorkerError(
                f"{worker} failed in {call.method}: {cause.exception_type}: {cause.text}\n{cause.remote_traceback}",
                exception_type=cause.exception_type,
                remote_traceback=cause.remote_traceback,
                **names,
            ) from None
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            tail = log_tail(worker)
            raise WorkerDied(f"{worker} died in {call.method}: {error}{tail}", **names) from None

    def hang(self, ref: ray.ObjectRef) -> WorkerHang:
        """What to raise when a call has taken longer than the group's limit."""
        assert self.timeout_s is not None
        return self._hang([self._calls.pop(ref.task_id())], self.timeout_s)

    def _hang(self, late: list[_Call], timeout_s: float) -> WorkerHang:
        report = inspect_workers([call.worker for call in late], _INSPECT_S)
        first = late[0]
        names = ", ".join(str(call.worker) for call in late)
        return WorkerHang(
            f"no answer from {names} in {first.method} after {timeout_s:.3g} s\n{report}",
            worker=first.worker.name,
            rank=first.worker.rank,
            method=first.method,
        )

    def _end(self, *, failed: bool) -> None:
        members, self._members, self._calls = self._members, [], {}
        if ray.is_initialized():
            for worker in members:
                ray.kill(worker.handle, no_restart=True)
            _wait_for_exit(members)
        self._cluster.leave_seats(self.name_prefix, failed=failed)


def start_groups(count: int, start: Callable[[int], RayWorkerGroup]) -> list[RayWorkerGroup]:
    """`start(0)` to `start(count - 1)` side by side. When one fails, the others are ended and its error raised."""
    with ThreadPoolExecutor(max_workers=count) as threads:
        starts = [threads.submit(start, index) for index in range(count)]
    failures = [error for future in starts if (error := future.exception()) is not None]
    if failures:
        for future in starts:
            if future.exception() is None:
                future.result().shutdown()
        raise failures[0]
    return [future.result() for future in starts]


def wait_groups(groups: Sequence[RayWorkerGroup], refs: Sequence[ray.ObjectRef]) -> list[Any]:
    """Results of one call on each group, in order. The first that fails ends the wait; raises what `wait` raises."""
    pending = dict(zip(refs, groups, strict=True))
    started = time.monotonic()
    results: dict[ray.ObjectRef, Any] = {}
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_POLL_S)
        waited = time.monotonic() - started
        late = [ref for ref, group in pending.items() if group.timeout_s is not None and waited > group.timeout_s]
        for ref in ready:
            results[ref] = pending.pop(ref).wait([ref])[0]
        if late and not ready:
            raise pending[late[0]].hang(late[0])
    return [results[ref] for ref in refs]


def _check_python(py_executable: str, places: list[list[Bundle]]) -> None:
    # Ray itself would try again for ever. On other nodes the file cannot be looked for from here.
    here = ray.get_runtime_context().get_node_id()
    if any(bundles[0].node_id == here for bundles in places) and shutil.which(py_executable) is None:
        raise ValueError(f"py_executable {py_executable} does not exist or cannot be run on this node")


def _wait_for_exit(members: list[Worker]) -> None:
    """Until the processes on this node are gone: what they held on a GPU or a port is free when shutdown returns."""
    here = ray.get_runtime_context().get_node_id()
    pids = [w.identity.pid for w in members if w.identity is not None and w.identity.node_id == here]
    # A stopped process does not hear Ray's request to end, and a busy one may take long.
    for limit_s, sign in ((_EXIT_S, signal.SIGKILL), (_EXIT_S, None)):
        deadline = time.monotonic() + limit_s
        while (pids := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if sign is not None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
    if pids:
        logger.warning("processes %s still run after they were killed", pids)


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
    if num_workers is not None and num_workers != len(groups):
        raise ValueError(f"num_workers={num_workers} but {len(groups)} groups of bundles")
    if not groups or not all(groups) or len(set(flat)) != len(flat):
        raise ValueError(f"every worker needs bundles of its own, got {groups}")
    if min(flat) < 0 or max(flat) >= available:
        raise ValueError(f"bundles {groups} asked for on a cluster of {available} bundles")
    return groups
