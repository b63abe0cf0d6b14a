"""The controller's side of rollouts: prompts go out, handles of finished groups come back. Tokens never reach it."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.rollouts.records.record import StepIndex
from nemo_rl.rollouts.rollout_worker import GenerationUse, GroupKeeper, GroupRequest, KeeperLost, RolloutWorkerSettings
from nemo_rl.types import GroupHandle

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.rollout_worker.RolloutWorker"
NAME_PREFIX = "rollout"
KEEPER = "group_keeper"
MAX_RESTARTS = 3  # since a group was last finished
_KEEPER_ANSWERS_S = 10.0


class RolloutCollector:
    """Requests out, handles back: `collect` for a batch, `submit` and `finished` for groups that play beside training.

    An engine that dies while groups are played is restarted by `restart_generation`, which returns the new actor
    handles once they hold the policy's weights; then the groups are played again, with the same seeds and so, where the
    weights are the same, the same tokens. So are they when the rollout worker dies; what it had finished is kept.
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
        self._bytes_of_ended = 0
        self._keeper = _new_keeper()
        self._generation_workers = list(generation_workers)
        self.group = self._start(RayWorkerBuilder(WORKER, settings, generation_workers, self._keeper))
        self.restart_generation: Callable[[], Sequence[Any]] | None = None
        self.abandon_requests: Callable[[], None] | None = None  # has the engines forget what they were asked
        self.on_new_generation: Callable[[Sequence[Any]], None] | None = None  # whoever else uses the engines
        self._playing: dict[ray.ObjectRef, GroupRequest] = {}
        self._finished: dict[str, GroupHandle] = {}  # by group id, until somebody asks for them
        self._submitted: set[str] = set()  # ids of groups that `finished` hands out
        self._num_restarts = 0
        # Steps that are being written, with how to do it again and what is in them.
        self._recording: dict[ray.ObjectRef, tuple[tuple[Any, ...], Sequence[GroupHandle]]] = {}
        self._unused: deque[tuple[str, str]] = deque()  # groups whose handles are gone, for the keeper to forget
        self._postponed: WorkerError | None = None  # an engine's death that `tend` saw

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        return self._bytes_of_ended + self.group.controller_tensor_bytes

    def use_generation(self, workers: Sequence[Any]) -> None:
        """Send requests to these engines from now on. What played with one that died is played again."""
        self._generation_workers = list(workers)
        if self.on_new_generation is not None:
            self.on_new_generation(self._generation_workers)
        self._ask("set_generation_workers", self._generation_workers)
        self._postponed = None
        self._replay()

    # -- a batch, waited for

    def collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        """Play all requests at once; handles in the order of the requests."""
        with self._accelerator.hold(GENERATION):
            self._play(requests)
            while not all(request.group_id in self._finished for request in requests):
                self._advance()
        return [self._finished.pop(request.group_id) for request in requests]

    def stream(self, requests: Iterable[GroupRequest], max_in_flight: int) -> Iterator[list[GroupHandle]]:
        """Play the requests, at most `max_in_flight` of them at a time; what is finished comes as soon as it is."""
        waiting = iter(requests)
        own: set[str] = set()
        with self._accelerator.hold(GENERATION):
            while True:
                for request in itertools.islice(waiting, max_in_flight - len(own)):
                    own.add(request.group_id)
                    self._play([request])
                if not own:
                    return
                self._advance()
                done = [group_id for group_id in own if group_id in self._finished]
                own.difference_update(done)
                if done:
                    yield [self._finished.pop(group_id) for group_id in done]

    # -- beside training

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Begin to play these groups; `finished` hands them out."""
        self._submitted.update(request.group_id for request in requests)
        self._play(requests)

    def finished(self, *, wait: bool) -> list[GroupHandle]:
        """Submitted groups that have finished since the last call; with `wait`, one at least.

        Raises:
            WorkerError: when rollout worker or engines keep dying, or hang.
        """
        assert self._submitted or not wait, "nothing to wait for"
        self.tend()
        while wait and not self._submitted.intersection(self._finished):
            self._advance()
        done = [group_id for group_id in self._finished if group_id in self._submitted]
        self._submitted.difference_update(done)
        return [self._finished.pop(group_id) for group_id in done]

    def wait_all(self) -> None:
        """Return when no group is being played."""
        while self._playing:
            self._advance()

    def tend(self) -> None:
        """Take in what has finished, and see to a rollout worker that died, without waiting for any group.

        For use while the policy trains. The death of an engine is put off to the next call that waits, as its
        replacement needs weights, and what nobody can help is raised at once.
        """
        if self._postponed is not None:
            return
        try:
            self._take_in(self.group.done(list(self._playing)))
        except WorkerError as error:
            if not isinstance(error, WorkerDied) and error.engine_died and self.restart_generation is not None:
                self._postponed = error
            else:
                self._heal(error)

    def abandon(self) -> None:
        """Forget all groups, those that play and those that have finished."""
        self._playing, self._finished, self._postponed = {}, {}, None
        self._submitted.clear()
        self._ask("abandon")

    # -- how it is done

    def _play(self, requests: Iterable[GroupRequest]) -> None:
        for request in requests:
            self._playing[self.group.start_one(0, "collect", request)] = request

    def _advance(self) -> None:
        """Wait until a group is finished, or something died and is replaced."""
        postponed, self._postponed = self._postponed, None
        try:
            if postponed is not None:
                raise postponed
            self._take_in(list(self.group.wait_any(list(self._playing))))
        except WorkerError as error:
            self._heal(error)

    def _ask(self, method: str, *args: Any) -> Any:
        """What the rollout worker answers; one that dies over it is started again and asked the same."""
        while True:
            try:
                return self.group.call_one(0, method, *args)
            except WorkerError as error:
                if not isinstance(error, WorkerDied):
                    self.check_keeper(error)
                    raise
                self._heal(error)

    def _heal(self, error: WorkerError) -> None:
        """`_recover`, so many times in a row."""
        if self._num_restarts == MAX_RESTARTS:
            raise error
        self._num_restarts += 1
        self._recover(error)

    def _take_in(self, refs: Sequence[ray.ObjectRef]) -> None:
        for ref, handle in zip(refs, self.group.wait(refs), strict=True):
            self._finished[self._playing.pop(ref).group_id] = self._held(handle)
            self._num_restarts = 0
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        if unused:
            self._keeper.forget.remote(unused)

    def _held(self, handle: GroupHandle) -> GroupHandle:
        """A handle, with whose end the keeper need not hold the group any longer."""
        weakref.finalize(handle, self._unused.append, (handle.group_id, handle.ref.hex())).atexit = False
        return handle

    def _recover(self, error: WorkerError) -> None:
        """Start again what died and play its groups again; raise what that does not help against."""
        if isinstance(error, WorkerDied):
            if not error.worker.startswith(NAME_PREFIX):
                raise error
            logger.warning("%s; it is started again and %d groups replayed", first_line(error), len(self._playing))
            self._restart()
            if self.abandon_requests is not None:
                with suppress(WorkerError):  # an engine that died has none, and is found by whoever asks it next
                    self.abandon_requests()
            self.use_generation(self._generation_workers)
            unwritten, self._recording = list(self._recording.values()), {}
            for arguments, groups in unwritten:
                self._record(arguments, groups)
        elif error.engine_died and self.restart_generation is not None:
            logger.warning("%s; the engine is started again, %d groups replayed", first_line(error), len(self._playing))
            self._postponed = error  # until then nothing is tended, although the policy is waited for
            with self._accelerator.lend(GENERATION):
                workers = self.restart_generation()
            self.use_generation(workers)
        else:
            self.check_keeper(error)
            raise error

    def _replay(self) -> None:
        again, self._playing = list(self._playing.values()), {}
        self._play(again)

    def check_keeper(self, error: WorkerError) -> None:
        """Whether somebody failed for want of what the keeper of finished groups has.

        Raises:
            WorkerDied: the keeper, worker `KEEPER`-0, is gone or answers nothing, and with it all finished groups.
        """
        lost = first_line(error) if error.exception_type == KeeperLost.__name__ else self._keeper_loss()
        if lost is not None:
            text = f"{KEEPER}-0, the process that holds finished groups, is lost: {lost}"
            raise WorkerDied(text, worker=f"{KEEPER}-0", rank=0, method=error.method) from error

    def _keeper_loss(self) -> str | None:
        try:
            ray.get(self._keeper.is_there.remote(), timeout=_KEEPER_ANSWERS_S)
        except GetTimeoutError:
            return f"it answers nothing within {_KEEPER_ANSWERS_S:g} s"
        except RayActorError as death:
            return str(death)
        return None

    def replace_keeper(self) -> None:
        """A new keeper, without groups, and a rollout worker that uses it. All groups are forgotten."""
        ray.kill(self._keeper)
        self._keeper = _new_keeper()
        self._playing, self._finished, self._postponed, self._recording = {}, {}, None, {}
        self._submitted.clear()
        self._restart()

    def _restart(self) -> None:
        self._bytes_of_ended += self.group.controller_tensor_bytes
        self.group.shutdown()
        builder = RayWorkerBuilder(WORKER, self._settings, self._generation_workers, self._keeper)
        self.group = self._start(builder)

    # -- what finished groups hold

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> dict[str, float]:
        """What the environments themselves report of finished groups, as `<environment>/<metric>`."""
        names = [group.task_name for group in groups]
        return self._ask("environment_metrics", names, *(group.ref for group in groups))

    def messages(self, group: GroupHandle, index: int = 0) -> list[dict[str, str]]:
        """What was said in one sample of a finished group. The text alone comes back."""
        return self._ask("messages", group.ref, index)

    def conversations(self, groups: Sequence[GroupHandle]) -> list[list[list[dict[str, str]]]]:
        """What was said in each sample of each group, in one call. The text alone comes back."""
        return self._ask("conversations", *(group.ref for group in groups))

    def save(self, groups: Sequence[GroupHandle], folder: Path) -> None:
        """Have finished groups written into a folder; see `record.py`."""
        names = [group.task_name for group in groups]
        self._ask("save", folder, names, *(group.ref for group in groups))

    def load(self, folder: Path) -> list[GroupHandle]:
        """Handles of the groups that `save` wrote."""
        return [self._held(handle) for handle in self._ask("load", folder)]

    # -- records

    def start_record(self, root: Path, index: StepIndex, keep: int | None, groups: Sequence[GroupHandle]) -> None:
        """Begin to write the groups of a training step; see `record.py`."""
        names = [group.task_name for group in groups]
        self._record((root, index, keep, names, *(group.ref for group in groups)), groups)

    def finish_records(self) -> int:
        """Wait for what `start_record` began. Returns the bytes written.

        Raises:
            WorkerError: a step could not be written.
        """
        num_bytes = 0
        while self._recording:
            ref = next(iter(self._recording))
            try:
                [written] = self.group.wait([ref])
            except WorkerError as error:
                if not isinstance(error, WorkerDied):
                    self.check_keeper(error)
                    raise
                self._heal(error)
                continue
            num_bytes += written
            del self._recording[ref]
        return num_bytes

    def _record(self, arguments: tuple[Any, ...], groups: Sequence[GroupHandle]) -> None:
        self._recording[self.group.start_one(0, "record", *arguments)] = (arguments, groups)

    def generation_use(self) -> GenerationUse:
        """How much the engines had to do since the last call, or since the rollout worker was replaced."""
        return self._ask("generation_use")

    def shutdown(self) -> None:
        """End the worker, and the keeper with all groups."""
        self._playing, self._postponed, self._recording = {}, None, {}  # whoever ends later may still `tend`
        self.group.shutdown()
        if ray.is_initialized():
            ray.kill(self._keeper)


def _new_keeper() -> Any:
    return ray.remote(GroupKeeper).options(num_cpus=0).remote()
