"""Weights to engines on devices of their own: one process sends, the others receive, in a process group made for it.

Member 0 is rank 0 of the policy, member 1 + n the n-th rank of the engines. The group is independent of the groups in
which either side computes. It meets at a key-value store in the sender's process, which waits for the others in the
background; nobody enters a call that cannot be left before all are there. gloo between hosts, NCCL between GPUs.

A member that ends breaks the group for all: whoever replaces it makes a new one.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.distributed.collectives import own_address
from nemo_rl.distributed.errors import first_line
from nemo_rl.refit.buffers import TransferBuffer
from nemo_rl.refit.layout import NUM_HALVES

if TYPE_CHECKING:
    from torch.distributed import Store, Work

KEY = "collective"
_BACKLOG = 4096
_POLL_S = 0.01
_COMPLETE = "complete"
_CONNECT_S = 120.0  # to connect members of which each has just said that it is there


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where a group meets: `address` of the sender's node, how many receive, and the limit for every wait."""

    address: str
    num_receivers: int
    timeout_s: float


class CollectiveBuffer(TransferBuffer):
    """A buffer in each member's own memory; a half that the sender has filled is broadcast to the same half of the
    others.

    Broadcasts run beside whoever began them. Every wait ends after the limit of the rendezvous, or when a member has
    left, with a ConnectionError that says which side is missing.
    """

    def __init__(self, member: int, endpoint: dict[str, Any], store: Store, device: torch.device) -> None:
        self.bytes = torch.zeros(endpoint["nbytes"], dtype=torch.uint8, device=device)
        self.key = KEY
        self._member = member
        self._endpoint = endpoint
        self._store: Any = store  # None when the group is left
        self._timeout_s: float = endpoint["timeout_s"]
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL, whose stubs lack half of what they have
        self._doors: set[tuple[str, int]] = set()  # where gloo's members take connections
        self._works: dict[int, Work] = {}  # half -> its broadcast that is under way
        self._leaving = threading.Event()
        self._joining: threading.Thread | None = None
        self._failure: Exception | None = None  # why the group could not be made

    @classmethod
    def create(cls, nbytes: int, device: torch.device, rendezvous: Rendezvous) -> CollectiveBuffer:
        """The sender's. Returns at once; the receivers are waited for in the background."""
        from torch.distributed import TCPStore

        family = socket.AF_INET6 if ":" in rendezvous.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((rendezvous.address, 0))
        listener.listen(_BACKLOG)
        endpoint = {
            "host": rendezvous.address,
            "port": listener.getsockname()[1],
            "size": 1 + rendezvous.num_receivers,
            "nbytes": nbytes,
            "timeout_s": rendezvous.timeout_s,
        }
        store = TCPStore(
            endpoint["host"],
            endpoint["port"],
            is_master=True,
            timeout=timedelta(seconds=rendezvous.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self = cls(0, endpoint, store, device)
        self._joining = threading.Thread(target=self._join_as_sender, daemon=True)
        self._joining.start()
        return self

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device, receiver: int) -> CollectiveBuffer:
        """That of receiver number `receiver`. Returns when all members are there; ConnectionError when they are not."""
        from torch.distributed import DistError, TCPStore

        started = time.monotonic()
        try:
            store = TCPStore(
                endpoint["host"],
                endpoint["port"],
                is_master=False,
                timeout=timedelta(seconds=endpoint["timeout_s"]),
                wait_for_workers=False,
            )
            self = cls(1 + receiver, endpoint, store, device)
            store.set(_here(receiver), "")
            self._wait_for([_COMPLETE], started, lambda: "other engines")
            self._group = self._connect()
        except DistError as error:
            raise ConnectionError(f"the policy's rank 0 has left the group: {first_line(error)}") from error
        return self

    def endpoint(self) -> dict[str, Any]:
        return self._endpoint

    def await_free(self, half: int) -> None:
        self._await(half, "an engine has left")

    def filled(self, half: int, nbytes: int) -> None:
        self._begin(half, nbytes)

    def expect(self, half: int, nbytes: int) -> None:
        self._begin(half, nbytes)

    def await_arrival(self, half: int) -> None:
        self._await(half, "the policy's rank 0, or an engine that passes its weights on, has left")

    def close(self) -> None:
        """Leave the group: whoever waits for this member is told at once."""
        self._leaving.set()
        if self._joining is not None:
            self._joining.join()
            self._joining = None
        self._disconnect()
        self._store = self._failure = None  # with the store ends what others wait for
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _disconnect(self) -> None:
        if self._group is not None and self.bytes.is_cuda:
            self._group.abort()
        else:  # gloo's group would first wait for what its members do not send and take any more
            _shut(self._doors)
        self._works.clear()
        self._group = None

    def _join_as_sender(self) -> None:
        from torch.distributed import DistError

        receivers = range(self._endpoint["size"] - 1)

        def missing() -> str:
            late = [str(number) for number in receivers if not self._store.check([_here(number)])]
            return f"the engines' {'ranks' if len(late) > 1 else 'rank'} {', '.join(late)}"

        try:
            self._wait_for([_here(number) for number in receivers], time.monotonic(), missing)
            self._store.set(_COMPLETE, "")
            self._group = self._connect()
        except (ConnectionError, DistError) as error:  # raised by the next use
            self._failure = error

    def _wait_for(self, keys: list[str], started: float, missing: Callable[[], str]) -> None:
        while not self._store.check(keys):
            if self._leaving.wait(_POLL_S):
                raise ConnectionError("the group was given up before it was complete")
            if time.monotonic() - started > self._timeout_s:
                raise ConnectionError(f"after {self._timeout_s:.3g} s {missing()} had not joined")

    def _connect(self) -> Any:
        if self.bytes.is_cuda:
            from torch.distributed import ProcessGroupNCCL

            options: Any = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            return ProcessGroupNCCL(self._store, self._member, self._endpoint["size"], options)
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        own, before = own_address(self._endpoint["host"], self._endpoint["port"]), _listening()
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=min(_CONNECT_S, self._timeout_s))
        self._store.set(f"door/{self._member}", json.dumps(sorted(_listening() - before)))
        group = gloo(self._store, self._member, self._endpoint["size"], options)
        doors = [json.loads(self._store.get(f"door/{member}")) for member in range(self._endpoint["size"])]
        self._doors = {(host, port) for places in doors for host, port in places}
        return group

    def _begin(self, half: int, nbytes: int) -> None:
        from torch.distributed import BroadcastOptions

        assert half not in self._works, "the half is under way"
        if nbytes == 0:
            return
        if self._joining is not None:
            self._joining.join()
            self._joining = None
        if self._failure is not None:
            raise ConnectionError(first_line(self._failure)) from self._failure
        if self._group is None:
            raise ConnectionError("this process has left the group, which was broken")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        first = half * (self.bytes.numel() // NUM_HALVES)
        try:
            self._works[half] = self._group.broadcast([self.bytes[first : first + nbytes]], options)
        except RuntimeError as error:
            raise self._broken("the group is broken", error) from error

    def _await(self, half: int, reason: str) -> None:
        work = self._works.pop(half, None)
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._broken(reason, error) from error

    def _broken(self, reason: str, error: Exception) -> ConnectionError:
        """Leave the group, as members may wait for this one to pass on what it did not get."""
        self._disconnect()
        return ConnectionError(f"{reason}: {first_line(error)}")


def _tcp_sockets() -> Iterator[socket.socket]:
    """Those of this process, each under a descriptor of its own for as long as it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def _listening() -> set[tuple[str, int]]:
    """Where this process takes connections."""
    return {
        found.getsockname()[:2] for found in _tcp_sockets() if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _shut(doors: set[tuple[str, int]]) -> None:
    """End the connections of this process that were taken at one of `doors`."""
    for found in _tcp_sockets():
        with suppress(OSError):  # not connected any more
            if found.getpeername()[:2] in doors or found.getsockname()[:2] in doors:
                found.shutdown(socket.SHUT_RDWR)


def _here(receiver: int) -> str:
    return f"here/{receiver}"
