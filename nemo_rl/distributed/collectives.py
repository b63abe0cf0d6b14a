"""The rendezvous of a worker group, and torch.distributed on top of it.

Finding a free port, closing it and binding it later sometimes loses the port to another process. Here rank 0 binds a
port that the system chose and keeps the listening socket, which its key-value store takes over. Ranks that connect
before the store is up wait in the socket's queue.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_BACKLOG = 4096  # all ranks may connect before rank 0 has imported torch

_listener: socket.socket | None = None
_store: Store | None = None
_num_groups = 0


def reserve_port(address: str) -> int:
    """Bind a port of `address` chosen by the system and keep listening on it. Called in the process of rank 0."""
    global _listener
    assert _listener is None, "the rendezvous port of this process is reserved already"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _listener = socket.socket(family, socket.SOCK_STREAM)
    _listener.bind((address, 0))
    _listener.listen(_BACKLOG)
    return _listener.getsockname()[1]


def release_port() -> None:
    """Close the reserved port in the process of rank 0, for a rendezvous that binds it itself."""
    global _listener
    assert _listener is not None, "rank 0 reserves its port before the worker starts"
    _listener.close()
    _listener = None


def own_address(host: str, port: int) -> str:
    """The address of this process as seen from `host`. Sends no packet."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def rendezvous_store(timeout_s: float = 600.0) -> Store:
    """The key-value store shared by all ranks of this worker group. The first call in each process creates it."""
    global _listener, _store
    from torch.distributed import TCPStore

    if _store is not None:
        return _store
    is_master = os.environ["RANK"] == "0"
    listen_fd = None
    if is_master:
        assert _listener is not None, "rank 0 reserves its port before the worker starts"
        listen_fd = _listener.detach()
        _listener = None
    _store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    return _store


def init_process_group(backend: str, timeout_s: float = 600.0) -> None:
    """`torch.distributed.init_process_group` over the worker group this process belongs to.

    Call it once in the worker's constructor, e.g. with "gloo", "nccl" or "cpu:gloo,cuda:nccl". Rank, world size and
    address come from the worker group. `timeout_s` limits the rendezvous and every later collective. Does nothing if
    the process has joined a world already. May be called again after `destroy_process_group`.
    """
    global _num_groups
    import torch.distributed as dist

    if dist.is_initialized():
        return
    store = rendezvous_store(timeout_s)
    _num_groups += 1
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"world_{_num_groups}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
