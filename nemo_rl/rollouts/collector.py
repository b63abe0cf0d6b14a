"""The controller's side of rollouts: requests go out, handles of finished groups come back. Tokens never reach it.

`RolloutCollector` has groups played. `RecordedRollouts` (`replay.py`) reads the groups of an earlier run instead.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.actor_host import Method
from nemo_rl.distributed.errors import RayLost, WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, ray_loss
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.rollouts.group_keeper import KEEPER, KeeperLost, loss_of, new_keeper, places_and_refs
from nemo_rl.rollouts.records import StepIndex, write_groups, write_step
from nemo_rl.rollouts.rollout_worker import GroupRequest, RolloutWorker, RolloutWorkerSettings
from nemo_rl.types import GroupHandle, LLMMessageLogType
from nemo_rl.utils.timer import GenerationUse

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.rollout_worker.RolloutWorker"
NAME_PREFIX = "rollout"
MAX_RESTARTS = 3  # since a group was last finished


class RestartableEngines(Protocol):
    """The engines, as the collector sees them when a process dies."""

    def restart_dead_workers(self) -> Sequence[Any]:
        """Start dead engines again. Returns the actor handles of all once they hold the present weights."""
        ...

    def abandon_requests(self) -> None:
        """Make the engines drop all requests."""


class RolloutCollector:
    """Has groups played: `collect` and `stream` wait for them, `submit` and `finished` run beside training.

    After the death of an engine, `engines` restarts it. Then unfinished groups are played again, with the same seeds
    and therefore, if the weights are the same, the same tokens. After the death of the rollout worker unfinished groups
    are played again too; finished groups are kept. `engines` None: the death of an engine ends the run.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        settings: RolloutWorkerSettings,
        generation_workers: Sequence[Any],
        accelerator: Accelerator,
        *,
        timeout_s: float,
    ) -> None:
        self._start = partial(RayWorkerGroup, cluster, name_prefix=NAME_PREFIX, num_workers=1, timeout_s=timeout_s)
        self._accelerator = accelerator
        self._settings = settings
        self._keeper = new_keeper()
        self._keeper_loss = lambda: loss_of(self._keeper)
        self._generation_workers = list(generation_workers)
        self.group = self._start(RayWorkerBuilder(WORKER, settings, generation_workers, self._keeper))
        self.engines: RestartableEngines | None = None
        self._playing: dict[ray.ObjectRef, list[GroupRequest]] = {}
        self._finished: dict[str, GroupHandle] = {}  # by group id, until a method returns them
        self._submitted: set[str] = set()  # ids of groups that `finished` returns
        self._num_restarts = 0
        # Arguments of `start_record` for the steps that are being written, whose groups must stay alive.
        self._recording: dict[ray.ObjectRef, tuple[Path, StepIndex, int | None, Sequence[GroupHandle]]] = {}
        self._unused: deque[tuple[str, str]] = deque()  # groups without handles, which the keeper can forget
        self._postponed: WorkerError | None = None  # an engine's death that `poll` found

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        return self.group.controller_tensor_bytes

    def use_generation(self, workers: Sequence[Any]) -> None:
        """Send requests to these engines from now on, and play unfinished groups again."""
        self._generation_workers = list(workers)
        self._call(RolloutWorker.set_generation_workers, self._generation_workers)
        self._postponed = None
        unfinished, self._playing = self._unfinished(), {}
        self._play(unfinished)

    # -- groups that the caller waits for

    def next_groups(
        self, step: int, next_requests: Callable[[], Sequence[GroupRequest]], *, is_first: bool
    ) -> list[GroupHandle]:
        """The next batch of groups for training step `step`, counted from 1: plays `next_requests()`.

        `is_first` is true for the first batch of the step. An empty list means that there are no more steps.
        """
        return self.collect(next_requests())

    def collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        """Play all requests concurrently. Returns handles in the order of the requests."""
        found = {handle.group_id: handle for handles in self.stream(requests, len(requests)) for handle in handles}
        return [found[request.group_id] for request in requests]

    def stream(self, requests: Iterable[GroupRequest], max_in_flight: int) -> Iterator[list[GroupHandle]]:
        """Play the requests, at most `max_in_flight` at a time, and yield groups as soon as they finish."""
        waiting = iter(requests)
        own: set[str] = set()
        with self._accelerator.hold(GENERATION):
            while True:
                new = list(itertools.islice(waiting, max_in_flight - len(own)))
                own.update(request.group_id for request in new)
                self._play(new)
                if not own:
                    return
                self._advance()
                if done := self._take(own):
                    yield done

    # -- groups that are played beside training

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Begin to play these groups; `finished` returns them."""
        self._submitted.update(request.group_id for request in requests)
        self._play(requests)

    def finished(self, *, wait: bool) -> list[GroupHandle]:
        """Submitted groups that have finished since the last call; with `wait`, at least one.

        WorkerError if the rollout worker or the engines die repeatedly, or hang.
        """
        assert self._submitted or not wait, "nothing to wait for"
        self.poll()
        while wait and not self._submitted.intersection(self._finished):
            self._advance()
        return self._take(self._submitted)

    def wait_all(self) -> None:
        """Return when no group is being played."""
        while self._playing:
            self._advance()

    def poll(self) -> None:
        """Accept finished groups and restart a dead rollout worker, without waiting for a group.

        For use while the policy trains. The death of an engine is postponed to the next call that waits, because a new
        engine needs weights. Errors that a retry cannot fix are raised immediately.
        """
        if self._postponed is not None:
            return
        try:
            self._accept(self.group.done(list(self._playing)))
        except WorkerError as error:
            if error.engine_died and self.engines is not None:
                self._postponed = error
            else:
                self._recover(error)

    def abandon(self) -> None:
        """Drop all groups, unfinished and finished."""
        self._playing, self._finished, self._postponed = {}, {}, None
        self._submitted.clear()
        self._call(RolloutWorker.abandon)

    # -- calls and recovery

    def _take(self, wanted: set[str]) -> list[GroupHandle]:
        """The finished groups among `wanted`, whose ids leave the set."""
        done = [group_id for group_id in self._finished if group_id in wanted]
        wanted.difference_update(done)
        return [self._finished.pop(group_id) for group_id in done]

    def _play(self, requests: Sequence[GroupRequest]) -> None:
        if requests:
            self._playing[self.group.start_one(0, RolloutWorker.collect, requests)] = list(requests)

    def _unfinished(self) -> list[GroupRequest]:
        return [request for requests in self._playing.values() for request in requests]

    def _advance(self) -> None:
        """Wait until a group is finished, or a dead process is replaced."""
        postponed, self._postponed = self._postponed, None
        try:
            if postponed is not None:
                raise postponed
            self._accept(list(self.group.wait_any(list(self._playing))))
        except WorkerError as error:
            self._recover(error)

    def _call[**P, R](self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the rollout worker. If it dies during the call, restart it and call again."""
        while True:
            try:
                return self.group.call_one(0, method, *args, **kwargs)
            except WorkerError as error:
                self._recover_worker(error)

    def _call_with(self, function: Callable[..., Any], groups: Sequence[GroupHandle], *args: Any) -> Any:
        return self._call(RolloutWorker.with_groups, function, args, *places_and_refs(groups))

    def _accept(self, refs: Sequence[ray.ObjectRef]) -> None:
        for ref, handles in zip(refs, self.group.wait(refs), strict=True):
            ended = {handle.group_id: self.track(handle) for handle in handles}
            self._finished |= ended
            if rest := [request for request in self._playing.pop(ref) if request.group_id not in ended]:
                again = self.group.start_one(0, RolloutWorker.collect_rest, [request.group_id for request in rest])
                self._playing[again] = rest
            self._num_restarts = 0
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        if unused:
            self._keeper.forget.remote(unused)

    def track(self, handle: GroupHandle) -> GroupHandle:
        """Note when the handle is garbage-collected: the keeper can then forget the group."""
        finalizer: Any = weakref.finalize(handle, self._unused.append, (handle.group_id, handle.ref.hex()))
        finalizer.atexit = False
        return handle

    def _recover_worker(self, error: WorkerError) -> None:
        """`_recover` if the worker died during a call; raise any other error."""
        if isinstance(error, WorkerDied):
            return self._recover(error)
        self.raise_if_keeper_lost(error)
        raise error

    def _recover(self, error: WorkerError) -> None:
        """Restart the dead process and play its groups again. Raises errors that no restart can fix, or that repeat."""
        if error.exception_type == KeeperLost.__name__:  # whatever was restarted before: a node takes several with it
            self.raise_if_keeper_lost(error)
        if self._num_restarts == MAX_RESTARTS:
            raise error
        self._num_restarts += 1
        if isinstance(error, WorkerDied):
            if not error.worker.startswith(NAME_PREFIX):
                raise error
            logger.warning("%s; restarting it and replaying %d groups", first_line(error), len(self._unfinished()))
            self._restart()
            if self.engines is not None:
                with suppress(WorkerError):  # a dead engine has no requests, and its next caller finds it
                    self.engines.abandon_requests()
            self.use_generation(self._generation_workers)
            unwritten, self._recording = list(self._recording.values()), {}
            for arguments in unwritten:
                self.start_record(*arguments)
        elif error.engine_died and self.engines is not None:
            logger.warning("%s; restarting the engine, replaying %d groups", first_line(error), len(self._unfinished()))
            self._postponed = error  # so that `poll`, which runs while the policy is called, does nothing
            with self._accelerator.lend(GENERATION):
                workers = self.engines.restart_dead_workers()
            self.use_generation(workers)
        else:
            self.raise_if_keeper_lost(error)
            raise error

    def raise_if_keeper_lost(self, error: WorkerError) -> None:
        """WorkerDied if the keeper of finished groups, worker `KEEPER`-0, is lost with all of them.

        RayLost if it cannot answer because Ray's own process has ended or is stopped.
        """
        loss = first_line(error) if error.exception_type == KeeperLost.__name__ else self._keeper_loss()
        if loss is None:
            return
        text = f"{KEEPER}-0, the process that holds finished groups, is lost: {loss}"
        if (cause := ray_loss()) is not None:
            raise RayLost(f"{text.splitlines()[0]}: {cause}") from error
        raise WorkerDied(text, worker=f"{KEEPER}-0", rank=0, method=error.method) from error

    def replace_keeper(self) -> None:
        """Start a new keeper without groups, and a rollout worker that uses it. All groups are dropped."""
        ray.kill(self._keeper)
        self._keeper = new_keeper()
        self._recording = {}
        self._restart()
        self.abandon()

    def _restart(self) -> None:
        old = self.group
        old.shutdown()
        self.group = self._start(RayWorkerBuilder(WORKER, self._settings, self._generation_workers, self._keeper))
        self.group.controller_tensor_bytes += old.controller_tensor_bytes

    def inspect(self, function: Callable[..., Any], *args: Any, groups: Sequence[GroupHandle]) -> Any:
        """`await function(worker, *args, *groups)` on the rollout worker, with the engines awake."""
        with self._accelerator.hold(GENERATION):
            return self._call_with(function, groups, *args)

    # -- content of finished groups

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> Callable[[], dict[str, float]]:
        """Ask the environments for metrics of finished groups.

        The result waits for their answer, `<environment>/<metric>` and value.
        """
        args = RolloutWorker.environment_metrics, ([group.task_name for group in groups],)
        asked, ref = self.group, self.group.start_one(0, RolloutWorker.with_groups, *args, *places_and_refs(groups))

        def answer() -> dict[str, float]:
            try:
                if asked is self.group:
                    return asked.wait([ref])[0]
            except WorkerError as error:
                self._recover_worker(error)
            # Another worker has taken its place.
            return self._call(RolloutWorker.with_groups, *args, *places_and_refs(groups))

        return answer

    def conversations(self, groups: Sequence[GroupHandle]) -> list[list[LLMMessageLogType]]:
        """The conversation of each sample of each group, without tokens, in one call."""
        return self._call_with(RolloutWorker.conversations, groups)

    def save(self, groups: Sequence[GroupHandle], folder: Path) -> None:
        """Write finished groups into a folder; see `records.write_groups`."""
        task_names = [group.task_name for group in groups]
        self._call_with(RolloutWorker.write, groups, partial(write_groups, folder), task_names)

    def load(self, folder: Path) -> list[GroupHandle]:
        """Handles of groups that `save` wrote."""
        return [self.track(handle) for handle in self._call(RolloutWorker.load, folder)]

    def start_record(self, root: Path, index: StepIndex, keep: int | None, groups: Sequence[GroupHandle]) -> None:
        """Begin to write the groups of a training step; see `records.write_step`."""
        args = partial(write_step, root, index, keep=keep), [group.task_name for group in groups]
        ref = self.group.start_one(0, RolloutWorker.with_groups, RolloutWorker.write, args, *places_and_refs(groups))
        self._recording[ref] = root, index, keep, groups

    def finish_records(self) -> int:
        """Wait for all records that `start_record` began. Returns the bytes written.

        WorkerError if a step could not be written.
        """
        num_bytes = 0
        while self._recording:
            ref = next(iter(self._recording))
            try:
                num_bytes += self.group.wait([ref])[0]
                del self._recording[ref]
            except WorkerError as error:
                self._recover_worker(error)
        return num_bytes

    def generation_use(self) -> GenerationUse:
        """Use of the engines since the last call, or since the rollout worker was started."""
        return self._call(RolloutWorker.generation_use)

    def shutdown(self) -> None:
        """Stop the worker, and the keeper with all groups."""
        self._playing, self._postponed, self._recording = {}, None, {}  # `poll` may still be called
        self.group.shutdown()
        if ray.is_initialized():
            ray.kill(self._keeper)
