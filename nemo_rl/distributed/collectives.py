"""The rendezvous of a worker group, torch.distributed on top of it, and two collectives that gloo is slow at.

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
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store, Work

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


def init_process_group(backend: str, timeout_s: float = 600.0) -> None:
    """`torch.distributed.init_process_group` over the worker group this process belongs to.

    Call it once in the worker's constructor, e.g. with "gloo", "nccl" or "cpu:gloo,cuda:nccl". Rank, world size and
    address come from the worker group. `timeout_s` limits the rendezvous and every later collective. Does nothing if
    the process has joined a world already. May be called again after `destroy_process_group`.
    """
    global _listener, _num_groups, _store
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, world_size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    if _store is None:
        assert rank > 0 or _listener is not None, "rank 0 reserves its port before the worker starts"
        _store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=_listener.detach() if _listener is not None else None,
        )
        _listener = None
    _num_groups += 1
    store = dist.PrefixStore(f"world_{_num_groups}", _store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


# -- gloo takes about twice as long for its own all-gather and reduce-scatter as for the messages that they consist of


def gather_rows(whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """`all_gather_single`: write the `own` rows of every rank of `group` into `whole`, end to end. Both contiguous.

    `own` may be this rank's part of `whole`.
    """
    import torch.distributed as dist

    if whole.is_cuda:
        dist.all_gather_single(whole, own, group=group)
        return
    parts = whole.view(-1).chunk(group.size())
    if parts[group.rank()].data_ptr() != own.data_ptr():
        parts[group.rank()].copy_(own.view(-1))
    for work in _exchange([own.view(-1)] * group.size(), list(parts), group):
        work.wait()


def scatter_sums(own: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    """`reduce_scatter_single` with sums: this rank's part of the sum of `whole` over `group`, into `own`.

    On a CPU each rank adds in the order of the ranks.
    """
    import torch
    import torch.distributed as dist

    if whole.is_cuda:
        dist.reduce_scatter_single(own, whole, group=group)
        return
    parts = list(whole.view(-1).chunk(group.size()))
    received = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(parts)]
    for work in _exchange(parts, received, group):
        work.wait()
    total = own.view(-1)
    total.copy_(received[0])
    for part in received[1:]:
        total.add_(part)


def _exchange(sent: list[Tensor], received: list[Tensor], group: ProcessGroup) -> list[Work]:
    """Send entry r of `sent` to rank r of `group`, and receive its message in entry r of `received`."""
    import torch.distributed as dist

    messages = []
    for peer in range(group.size()):
        if peer != group.rank():
            messages.append(dist.P2POp(dist.isend, sent[peer], group=group, group_peer=peer))
            messages.append(dist.P2POp(dist.irecv, received[peer], group=group, group_peer=peer))
    return dist.batch_isend_irecv(messages) if messages else []
