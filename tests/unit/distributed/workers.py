"""Plain worker classes for the tests of worker groups."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray


class EchoWorker:
    def __init__(self, greeting: str = "hello", *, fail_on_rank: int | None = None) -> None:
        self.greeting = greeting
        self.rank = int(os.environ["RANK"])
        if fail_on_rank == self.rank:
            raise ValueError("no such weights")

    def echo(self, *args: Any, **kwargs: Any) -> tuple[str, int, tuple[Any, ...], dict[str, Any]]:
        return self.greeting, self.rank, args, kwargs

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def join(self) -> int:
        """Its process group, again if it had before; the number of ranks."""
        import torch.distributed as dist

        from nemo_rl.distributed.collectives import init_process_group

        if dist.is_initialized():
            dist.destroy_process_group()
        init_process_group("gloo", timeout_s=60)
        return dist.get_world_size()

    def sum_ranks(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(value)
        return value.item()

    def raise_on(self, rank: int) -> None:
        if rank == self.rank:
            raise KeyError("missing row")
        time.sleep(60)

    def sleep_on(self, rank: int, seconds: float) -> None:
        if rank == self.rank:
            time.sleep(seconds)

    async def wait_async(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)


@ray.remote
class DecoratedWorker(EchoWorker):
    """As scripts of NeMo RL write their workers."""


class SlowStartWorker:
    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)


class StoppedWorker:
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # the main thread takes the signal; until it gets a core, this one would go on
