"""Rows of a dataset -> tokenised groups in the object store, for training without sampling (SFT, DPO, reward models).

`TokenizerWorker` runs in its own actor. It tokenises rows and puts them into the object store in groups.
`TokenizerPool`, on the controller, distributes the rows of a batch over the workers and receives handles. Tokens never
reach it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray

from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup, start_groups
from nemo_rl.types import Example, ExampleGroup, ExampleHandle, ExampleMeta, MakeExample, Prompt

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.tokenizer_pool.TokenizerWorker"
MAX_GROUP_ROWS = 32
MAX_RESTARTS = 3  # in one batch

MadeRow = tuple[list[Example], ExampleMeta]


class RowCache(Protocol):
    """A cache of tokenised rows."""

    def load(self, prompts: Sequence[Prompt]) -> list[MadeRow | None]: ...  # None for rows that are not in the cache
    def store(self, prompts: Sequence[Prompt], made: Sequence[MadeRow]) -> None: ...


class TokenizerWorker:
    """Tokenises rows. A plain class. `open_cache` is called in its process; with None nothing is cached."""

    def __init__(self, make: MakeExample, open_cache: Callable[[], RowCache] | None) -> None:
        self.make = make
        self.cache = open_cache() if open_cache is not None else None

    def make_group(self, prompts: Sequence[Prompt]) -> ExampleHandle:
        """Tokenise rows and put them into the object store as one group."""
        group = ExampleGroup(samples=[])
        rows: list[ExampleMeta] = []
        for examples, meta in self.make_rows(prompts):
            rows.append(replace(meta, index=len(group.samples)))
            for example in examples:
                group.pixels |= example.pixels
                group.samples.append(replace(example, pixels={}))
        return ExampleHandle(ref=ray.put([group]), rows=rows)

    def make_rows(self, prompts: Sequence[Prompt]) -> list[MadeRow]:
        """Tokenise rows that are not in the cache."""
        if self.cache is None:
            return [self.make(prompt) for prompt in prompts]
        found = self.cache.load(prompts)
        made = [row if row is not None else self.make(prompt) for row, prompt in zip(found, prompts, strict=True)]
        new = [i for i, row in enumerate(found) if row is None]
        if new:
            self.cache.store([prompts[i] for i in new], [made[i] for i in new])
        return made

    async def is_alive(self) -> bool:
        """Answer, also while a row is tokenised."""
        return True


@dataclass(kw_only=True)
class PendingGroup:
    """Rows that become one group, and the call that makes it."""

    prompts: Sequence[Prompt]
    worker: int
    process: RayWorkerGroup  # the process of the worker at the call; the group is lost with it
    ref: Any  # ray.ObjectRef of the handle
    handle: ExampleHandle | None = None


class TokenizerPool:
    """`num_workers` tokenizer workers on CPU worker slots of one node, reserved separately from the slots of training.

    Handles live as long as their workers. A worker that dies is restarted, and its groups of the batch are made again.
    """

    def __init__(
        self,
        make: MakeExample,
        *,
        num_workers: int = 1,
        open_cache: Callable[[], RowCache] | None = None,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._builder = RayWorkerBuilder(WORKER, make, open_cache)
        self._cluster = RayVirtualCluster([num_workers], use_gpus=False, name="tokenizers")
        with ExitStack() as undo:
            undo.callback(self._cluster.shutdown)
            self._cluster.bundles()
            self._workers = start_groups(num_workers, self._start)
            undo.pop_all()

    def start(self, prompts: Sequence[Prompt]) -> list[PendingGroup]:
        """Begin to tokenise a batch, distributed over the workers in groups of at most `MAX_GROUP_ROWS` rows."""
        num_workers = len(self._workers)
        size = max(1, min(MAX_GROUP_ROWS, -(-len(prompts) // num_workers)))
        pending = []
        for number, start in enumerate(range(0, len(prompts), size)):
            worker, rows = number % num_workers, prompts[start : start + size]
            process = self._workers[worker]
            ref = process.start_one(0, TokenizerWorker.make_group, rows)
            pending.append(PendingGroup(prompts=rows, worker=worker, process=process, ref=ref))
        return pending

    def finish(self, pending: list[PendingGroup]) -> list[ExampleHandle]:
        """Wait for a batch. Its groups hold the rows in the order of the prompts; lost groups are made again.

        May be called several times for a batch. ValueError is the error of a row; WorkerError if a worker hangs or dies
        repeatedly.
        """
        num_restarts = 0
        for worker in range(len(self._workers)):
            own = [group for group in pending if group.worker == worker]
            while own:
                try:
                    self._collect(own, self._workers[worker])
                    break
                except WorkerDied as error:
                    num_restarts += 1
                    if num_restarts > MAX_RESTARTS:
                        raise
                    logger.warning("%s; restarting it and tokenising its rows again", first_line(error))
                    self._workers[worker].shutdown()
                    self._workers[worker] = self._start(worker)
        handles = [group.handle for group in pending if group.handle is not None]
        assert len(handles) == len(pending), "a group without a handle would be left out of the batch"
        return handles

    def shutdown(self) -> None:
        """Stop the workers. Their groups are lost."""
        for worker in self._workers:
            worker.shutdown()
        self._cluster.shutdown()

    def _collect(self, pending: list[PendingGroup], process: RayWorkerGroup) -> None:
        """Fill in the handles of one worker's groups. Raises WorkerDied if it has died since it made one of them."""
        for group in pending:
            if group.process is not process:
                group.process, group.handle = process, None
                group.ref = process.start_one(0, TokenizerWorker.make_group, group.prompts)
        waiting = [group for group in pending if group.handle is None]
        try:
            for group, handle in zip(waiting, process.wait([group.ref for group in waiting]), strict=True):
                group.handle = handle
            process.call_one(0, TokenizerWorker.is_alive)  # it may have died after its last answer
        except WorkerError as error:
            if error.exception_type != ValueError.__name__:
                raise
            text = str(error).removesuffix(f"\n{error.remote_traceback}").partition(f"{ValueError.__name__}: ")[2]
            raise ValueError(text) from error

    def _start(self, worker: int) -> RayWorkerGroup:
        # Each worker has its own group, so that it can be restarted by itself.
        return RayWorkerGroup(
            self._cluster,
            self._builder,
            name_prefix=f"tokenizer-{worker}",
            bundle_groups=[[worker]],
            timeout_s=self._timeout_s,
        )
