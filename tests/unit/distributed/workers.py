"""Plain worker classes for the tests of worker groups."""

import asyncio
import os
import signal
import subprocess
import time
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

    def multiply(self, size: int) -> float:
        """A matrix product, for profiles."""
        import torch

        return float((torch.ones(size, size) @ torch.ones(size, size))[0, 0])

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

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def pid(self) -> int:
        return os.getpid()

    def raise_on(self, rank: int) -> None:
        if rank == self.rank:
            raise KeyError("missing row")
        time.sleep(60)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleep_on(self, rank: int, seconds: float) -> None:
        if rank == self.rank:
            time.sleep(seconds)

    async def wait_async(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)

    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def six_version(self) -> str:
        import six

        return six.__version__


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
