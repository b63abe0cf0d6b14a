"""Small gloo worlds for tests: ranks are forked, so the parent's imports are paid for once.

def gather_ranks(rank: int, world_size: int) -> list[int]: ...
assert run_world(gather_ranks, 2) == [[0, 1], [0, 1]]
"""

import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_rl.environments.code.sandbox.isolation import PR_SET_PDEATHSIG, prctl


class RankDied(RuntimeError):
    """A rank ended without a result: killed, or `os._exit` was called."""


def run_world(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 800) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` forked ranks of one gloo world; results by rank.

    `fn` may be a closure; what it returns must pickle. Each rank runs on one thread. The first exception of any rank
    ends the world and is raised here with the rank's traceback as a note. `timeout` (seconds) is hard: every rank is
    killed and TimeoutError tells where each of them was.
    """
    # Pickled without torch's shared-memory reductions: those need the sender to live until the receiver has read.
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="world_") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = []
        for rank, (_, send) in enumerate(pipes):
            target_args = (fn, rank, world_size, args, Path(folder), send, timeout)
            ranks.append(context.Process(target=_run_rank, args=target_args, name=f"rank {rank}", daemon=True))
        try:
            for process in ranks:
                process.start()
            return _collect([receive for receive, _ in pipes], timeout, ranks, Path(folder))
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for receive, send in pipes:
                receive.close()
                send.close()


def _collect(receivers: list[Connection], timeout: float, ranks: list[Any], folder: Path) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        # A death shows by the sentinel alone: later ranks inherit the pipes of earlier ones, so no end of file comes.
        handles = [*waiting, *(ranks[rank].sentinel for rank in waiting.values())]
        ready = multiprocessing.connection.wait(handles, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = _stacks(sorted(waiting.values()), ranks, folder)
            raise TimeoutError(f"ranks {sorted(waiting.values())} still ran after {timeout} s\n{stacks}")
        for receiver, rank in waiting.items():
            if receiver not in ready and ranks[rank].sentinel not in ready:
                continue
            if not receiver.poll():
                ranks[rank].join()
                raise RankDied(f"rank {rank} ended with exit code {ranks[rank].exitcode} and no result")
            payload = receiver.recv_bytes()
            ok, value = pickle.loads(payload)
            if not ok:
                raise value
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _stacks(late: list[int], ranks: list[Any], folder: Path) -> str:
    for rank in late:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    # Below this frame lies only what forked the rank.
    stacks = {rank: (folder / f"stack_{rank}").read_text().partition("/multiprocessing/process.py")[0] for rank in late}
    return "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in stacks.items())


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    send: Connection,
    timeout: float,
) -> None:
    import torch
    import torch.distributed as dist

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank waits for the others, and would wait on when its test was killed
    with open(folder / f"stack_{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        gc.freeze()  # a collection would touch, and so copy, every object of the parent
        torch.set_num_threads(1)  # an OpenMP pool of the parent does not survive the fork
        store = dist.FileStore(str(folder / "rendezvous"), world_size)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout + 60)
            )
            result = fn(rank, world_size, *args)
            payload = pickle.dumps((True, result))
            dist.barrier()  # nobody leaves while another rank still talks to it
            dist.destroy_process_group()
        except BaseException as error:  # the whole point is to carry any failure, exits included, to the parent
            payload = _pickle_error(error, rank)
        send.send_bytes(payload)
        send.close()
        faulthandler.unregister(signal.SIGUSR1)


def _pickle_error(error: BaseException, rank: int) -> bytes:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"raised in rank {rank}:\n{text}")
    try:
        payload = pickle.dumps((False, error))
        pickle.loads(payload)
    except Exception:  # an exception class may fail to pickle in any way it likes; its text always does
        return pickle.dumps((False, RuntimeError(f"rank {rank} raised\n{text}")))
    return payload


def in_new_process(fn: Callable[..., Any], *args: Any, backend: str = "cpu:gloo,cuda:nccl") -> Any:
    """`fn(*args)` of the only rank of a world, spawned: a process that is forked after CUDA began cannot use it."""
    context = mp.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="world_") as folder:
        process = context.Process(target=_run_alone, args=(fn, args, folder, backend, send))
        process.start()
        send.close()
        result = pickle.loads(receive.recv_bytes())  # EOFError: it failed, and has printed why
        process.join()
    return result


def _run_alone(fn: Callable[..., Any], args: tuple[Any, ...], folder: str, backend: str, send: Connection) -> None:
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/rendezvous", 1), rank=0, world_size=1)
    send.send_bytes(pickle.dumps(fn(*args)))
    dist.destroy_process_group()
