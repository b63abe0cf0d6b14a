"""Rows of a dataset -> tokenised groups in the object store, where nothing is sampled (SFT, DPO, reward models).

`TokenizerWorker` runs in an actor of its own: it tokenises rows and puts them into the object store in groups.
`TokenizerPool` is the controller's side: it spreads the rows of a batch over the workers and gets handles back. Tokens
never reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray

from nemo_rl.distributed.errors import WorkerDied, WorkerError, first_line
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup, start_groups
from nemo_rl.types import Example, ExampleGroup, ExampleHandle, ExampleMeta, MakeExample, Prompt

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.rollouts.tokenizer_pool.TokenizerWorker"
NAME_PREFIX = "tokenizer"
MAX_GROUP_ROWS = 32
MAX_RESTARTS = 3  # in one batch

MadeRow = tuple[list[Example], ExampleMeta]


class RowCache(Protocol):
    """Rows that were tokenised before."""

    def load(self, prompts: Sequence[Prompt]) -> list[MadeRow | None]:
        """What is known of each row; None where nothing is."""
        ...

    def store(self, prompts: Sequence[Prompt], made: Sequence[MadeRow]) -> None: ...


class TokenizerWorker:
    """Tokenises rows. A plain class; `open_cache` is called in its process, None means that nothing is kept."""

    def __init__(self, make: MakeExample, open_cache: Callable[[], RowCache] | None) -> None:
        self.make = make
        self.cache = open_cache() if open_cache is not None else None

    def make_group(self, prompts: Sequence[Prompt]) -> ExampleHandle:
        """Tokenise these rows and put them into the object store as one group."""
        samples: list[Example] = []
        rows: list[ExampleMeta] = []
        for examples, meta in self.make_rows(prompts):
            rows.append(replace(meta, index=len(samples)))
            samples += examples
        return ExampleHandle(ref=ray.put(ExampleGroup(samples=samples)), rows=rows)

    def make_rows(self, prompts: Sequence[Prompt]) -> list[MadeRow]:
        """What is made of each row, from the cache where it is known."""
        if self.cache is None:
            return [self.make(prompt) for prompt in prompts]
        found = self.cache.load(prompts)
        made = [row if row is not None else self.make(prompt) for row, prompt in zip(found, prompts, strict=True)]
        new = [i for i, row in enumerate(found) if row is None]
        if new:
            self.cache.store([prompts[i] for i in new], [made[i] for i in new])
        return made

    async def is_alive(self) -> bool:
        """Answers while a row is tokenised."""
        return True


@dataclass(kw_only=True)
class _Chunk:
    """Rows that become one group, and the call that makes it."""

    prompts: Sequence[Prompt]
    worker: int
    life: int  # of the worker: groups are lost with the process that made them
    ref: Any  # ray.ObjectRef of the handle
    handle: ExampleHandle | None = None


@dataclass(kw_only=True)
class PendingExamples:
    """A batch that is being tokenised, or was. For `TokenizerPool.finish`, as often as it is needed."""

    chunks: list[_Chunk]


class TokenizerPool:
    """`num_workers` tokenizer workers on CPU worker slots of one node, booked apart from those of the training.

    Handles live as long as their workers. A worker that dies is restarted, and what it had made of the batch in
    question is made again.
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
        self._bytes_of_ended = 0
        self._lives = [0] * num_workers
        self._cluster = RayVirtualCluster([num_workers], use_gpus=False, name="tokenizers")
        try:
            self._cluster.bundles()
            self._workers = start_groups(len(self._lives), self._start)
        except BaseException:
            self._cluster.shutdown()
            raise

    @property
    def controller_tensor_bytes(self) -> int:
        """Bytes of arrays that passed through the controller on their way to or from the workers."""
        return self._bytes_of_ended + sum(worker.controller_tensor_bytes for worker in self._workers)

    def start(self, prompts: Sequence[Prompt]) -> PendingExamples:
        """Begin to tokenise a batch, spread over the workers in groups of at most `MAX_GROUP_ROWS` rows."""
        num_workers = len(self._workers)
        size = max(1, min(MAX_GROUP_ROWS, -(-len(prompts) // num_workers)))
        starts = range(0, len(prompts), size)
        return PendingExamples(
            chunks=[self._begin(prompts[at : at + size], number % num_workers) for number, at in enumerate(starts)]
        )

    def finish(self, pending: PendingExamples) -> list[ExampleHandle]:
        """Wait for a batch: its groups, which hold the rows in the order of the prompts; lost ones are made again.

        Raises:
            ValueError: what a row raised.
            WorkerError: when a worker keeps dying or hangs.
        """
        num_restarts = 0
        for worker in range(len(self._workers)):
            while (error := self._collect(pending, worker)) is not None:
                num_restarts += 1
                if num_restarts > MAX_RESTARTS:
                    raise error
                logger.warning("%s; it is started again and its rows tokenised once more", first_line(error))
                self._restart(worker)
        handles = [chunk.handle for chunk in pending.chunks]
        return [handle for handle in handles if handle is not None]

    def shutdown(self) -> None:
        """End the workers, and with them the groups that they made."""
        for worker in self._workers:
            worker.shutdown()
        self._cluster.shutdown()

    def _begin(self, prompts: Sequence[Prompt], worker: int) -> _Chunk:
        ref = self._workers[worker].start_one(0, "make_group", prompts)
        return _Chunk(prompts=prompts, worker=worker, life=self._lives[worker], ref=ref)

    def _collect(self, pending: PendingExamples, worker: int) -> WorkerDied | None:
        """Fill in the handles of one worker's groups; what it died of, if it did."""
        own = [i for i, chunk in enumerate(pending.chunks) if chunk.worker == worker]
        for i in own:
            if pending.chunks[i].life != self._lives[worker]:
                pending.chunks[i] = self._begin(pending.chunks[i].prompts, worker)
        chunks = [pending.chunks[i] for i in own if pending.chunks[i].handle is None]
        try:
            for chunk, handle in zip(chunks, self._workers[worker].wait([chunk.ref for chunk in chunks]), strict=True):
                chunk.handle = handle
            if own:
                self._workers[worker].call_one(0, "is_alive")  # it may have died since it answered
        except WorkerDied as error:
            return error
        except WorkerError as error:
            if error.exception_type != ValueError.__name__:
                raise
            told = str(error).removesuffix(f"\n{error.remote_traceback}").partition(f"{ValueError.__name__}: ")[2]
            raise ValueError(told) from error
        return None

    def _restart(self, worker: int) -> None:
        old = self._workers[worker]
        self._bytes_of_ended += old.controller_tensor_bytes
        old.shutdown()
        self._workers[worker] = self._start(worker)
        self._lives[worker] += 1

    def _start(self, worker: int) -> RayWorkerGroup:
        # A group of its own for each worker, so that one can be ended and started anew.
        return RayWorkerGroup(
            self._cluster,
            self._builder,
            name_prefix=f"{NAME_PREFIX}-{worker}",
            bundle_groups=[[worker]],
            timeout_s=self._timeout_s,
        )
