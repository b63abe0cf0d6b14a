"""The memory that carries weights from policy processes to generation processes.

    sender:   buffer = create_buffer(transport, nbytes, device); publish buffer.endpoint() under buffer.key
    receiver: buffer = attach_buffer(transport, endpoints, device); read buffer.bytes

`packed_shm` is memory of the node, `packed_ipc` memory of the GPU that both sides share, and `packed_collective` a
process group made for the transfer. Buffers are created once and reused by every sync: the first touch of fresh shared
pages costs about twelve times a copy into existing pages, and a CUDA allocation has to be exported and mapped again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.distributed.collectives import own_address
from nemo_rl.distributed.errors import first_line
from nemo_rl.refit.layout import NUM_HALVES, RefitError, Rendezvous, Transport
from nemo_rl.utils.guards import remove_after_me

_TOKEN_BYTES = 16
COLLECTIVE_KEY = "collective"
_BACKLOG = 4096
_POLL_S = 0.01
_JOINED, _COMPLETE = "engine rank {}", "other engines"  # keys of the store, which name who has not joined
_TOKEN_S = 5.0  # for the first bytes of a new connection
_STEP_S = 0.0002  # between looks at a broadcast
_CONNECT_S = 120.0  # to connect members that have all just announced themselves
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class TransferBuffer(Protocol):
    """`bytes` is the uint8 tensor of all halves; `key` names the location from which a reader can attach, and
    `endpoint` (JSON-able) is what it needs for that.

    When both processes map the same memory, the controller's calls synchronise them: nothing has to be started, and
    nothing is waited for.
    """

    bytes: torch.Tensor
    key: str
    endpoint: dict[str, Any]

    def start(self, half: int, nbytes: int) -> None:
        """Start to send the first `nbytes` of a half, or to receive them into it. ConnectionError if that is
        impossible."""

    def wait(self, half: int) -> None:
        """Wait until what was started for the half is done. ConnectionError if a member has left, or time is up."""

    def close(self) -> None:
        """Free the memory. The other side's mapping stays valid until it closes too."""
        ...


def create_buffer(
    transport: Transport, nbytes: int, device: torch.device, rendezvous: Rendezvous | None = None
) -> TransferBuffer:
    """The sender's buffer. `device`: the policy's device; `rendezvous`: for a collective."""
    if transport == "packed_collective":
        assert rendezvous is not None, "a collective needs a rendezvous"
        return CollectiveBuffer.create(nbytes, device, rendezvous)
    return CudaIpcBuffer.create(nbytes, device) if transport == "packed_ipc" else SharedMemoryBuffer.create(nbytes)


def attach_buffer(
    transport: Transport, endpoints: dict[str, dict[str, Any]], device: torch.device, receiver: int = 0
) -> TransferBuffer:
    """The receiver's view of the buffer at its own location, or its part in the collective as number `receiver`.

    RefitError if no sender is there, ConnectionError if the sender or another receiver is gone.
    """
    if transport == "packed_collective":
        return CollectiveBuffer.attach(endpoints[COLLECTIVE_KEY], device, receiver)
    key = device_key(device) if transport == "packed_ipc" else host_key()
    if key not in endpoints:
        location = "GPU" if transport == "packed_ipc" else "node"
        raise RefitError(
            f"{transport}: no policy worker shares this {location} ({key}); policy workers are on {sorted(endpoints)}. "
            "Place generation on the policy's nodes and devices (colocated)."
        )
    if transport == "packed_ipc":
        return CudaIpcBuffer.attach(endpoints[key], device)
    return SharedMemoryBuffer.attach(endpoints[key])


# -- shared memory of a node


def host_key() -> str:
    """Names the set of processes that see each other under /proc: one boot of one kernel, one process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


class SharedMemoryBuffer(TransferBuffer):
    """Anonymous shared memory (memfd), which a reader finds through /proc/<pid>/fd/<fd>.

    It has no name, so nobody can guess it, and the kernel frees it with its last mapping, even if the owner is killed.
    Only processes of the same user may open it, and its size is sealed. It does not count against the size of /dev/shm,
    which containers keep small.
    """

    def __init__(self, fd: int, nbytes: int, token: bytes) -> None:
        self._fd = fd
        self.endpoint = {"pid": os.getpid(), "fd": fd, "nbytes": nbytes, "token": token.hex()}
        mapping = mmap.mmap(fd, nbytes + _TOKEN_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)  # keeps the mapping alive
        self.key = host_key()

    @classmethod
    def create(cls, nbytes: int) -> SharedMemoryBuffer:
        """Allocate and touch `nbytes` of shared memory. OSError if the machine has less left."""
        fd = os.memfd_create("nemo_rl_weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, nbytes + _TOKEN_BYTES)  # fails here, not by a signal at the first write
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(fd, token, nbytes)
        return cls(fd, nbytes, token)

    @classmethod
    def attach(cls, endpoint: dict[str, Any]) -> SharedMemoryBuffer:
        """Map the owner's memory. ConnectionError if the owner has ended, or its process id means another process."""
        path, nbytes = f"/proc/{endpoint['pid']}/fd/{endpoint['fd']}", endpoint["nbytes"]
        token = bytes.fromhex(endpoint["token"])
        gone = f"the policy process {endpoint['pid']} no longer offers its weight buffer"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError) as error:
            raise ConnectionError(f"{gone}: {error}") from error
        if os.fstat(fd).st_size != nbytes + _TOKEN_BYTES or os.pread(fd, _TOKEN_BYTES, nbytes) != token:
            os.close(fd)
            raise ConnectionError(f"{gone}: {path} is something else by now")
        return cls(fd, nbytes, token)

    def close(self) -> None:
        os.close(self._fd)
        self.bytes = torch.empty(0, dtype=torch.uint8)  # the pages go with the last tensor that views them


# -- memory of a GPU


def device_key(device: torch.device) -> str:
    """The physical GPU, whatever index each process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def _remove_counters_after_me(name: str) -> None:
    """torch counts the readers of a process's exports in a file of this name, which it leaves in /dev/shm."""
    remove_after_me(f"/dev/shm{name}")


class CudaIpcBuffer(TransferBuffer):
    """Device memory exported once through CUDA IPC; the reader must be on the same physical GPU."""

    def __init__(self, buffer: torch.Tensor, handle: dict[str, Any]) -> None:
        self.bytes, self.endpoint = buffer, handle
        self.key = device_key(buffer.device)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaIpcBuffer:
        """Allocate on `device` and export. One export pairs with one reader: torch counts the references."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        reduced: tuple[Any, tuple[Any, ...]] = reduce_tensor(buffer)
        arguments = reduced[1]
        _remove_counters_after_me(os.fsdecode(arguments[11]))
        # Of the arguments of `rebuild_cuda_tensor`, only these are unknown to the reader. They travel without a pickle.
        shared = (*arguments[7:10], *arguments[11:15])  # handles of storage, counter and event, sizes and offsets
        shared = [value.hex() if isinstance(value, bytes) else value for value in shared]
        return cls(buffer, {"shared": shared, "tensor_offset": arguments[3], "nbytes": nbytes})

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device) -> CudaIpcBuffer:
        """Map the owner's memory on `device`, the reader's index of the same GPU."""
        index = torch.cuda.current_device() if device.index is None else device.index
        size = torch.Size([endpoint["nbytes"]])
        tensor = (torch.Tensor, size, (1,), endpoint["tensor_offset"], torch.storage.TypedStorage, torch.uint8, index)
        shared = [bytes.fromhex(value) if isinstance(value, str) else value for value in endpoint["shared"]]
        requires_grad = False
        arguments: tuple[Any, ...] = (*tensor, *shared[:3], requires_grad, *shared[3:])
        return cls(rebuild_cuda_tensor(*arguments), endpoint)

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


# -- a process group between the policy's rank 0 and every engine rank


class CollectiveBuffer(TransferBuffer):
    """A buffer in each member's own memory. A half that the sender fills is broadcast to the same half of the others.

    Member 0 is rank 0 of the policy, member 1 + n is rank n of the engines. The group is independent of the groups in
    which either side computes: gloo between hosts, NCCL between GPUs (`GROUPS`). Members meet at a key-value store in
    the sender's process, which waits for the others in the background. Then all take part in a broadcast of one byte:
    NCCL connects in the first collective, which blocks until every member has called it.

    Broadcasts run in the background. Every wait ends after the limit of the rendezvous, or when a member has left, with
    a ConnectionError. A member that ends breaks the group for all; a new sender makes a new group. NCCL does not notice
    an end: its kernels wait for ever. Each receiver therefore holds a TCP connection to the sender, which the kernel
    closes when either process ends. A thread that watches it aborts the group, as in the other members.
    """

    def __init__(
        self, member: int, endpoint: dict[str, Any], device: torch.device, listener: socket.socket | None = None
    ) -> None:
        self.bytes = torch.zeros(endpoint["nbytes"], dtype=torch.uint8, device=device)
        self.key = COLLECTIVE_KEY
        self.endpoint = endpoint
        self._member = member
        self._timeout_s: float = endpoint["timeout_s"]
        self._store: Any = dist.TCPStore(  # None after `close`
            endpoint["host"],
            endpoint["port"],
            is_master=listener is not None,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        self._group: Any = None  # of `GROUPS`
        self._works: dict[int, dist.Work] = {}  # half -> its broadcast in flight
        self._watched: list[socket.socket] = []  # a connection to each receiver, or to the sender
        self._lock = threading.Lock()
        self._left: str | None = None  # why this member has left the group
        self._joining: threading.Thread | None = None
        self._met = threading.Event()  # all receivers have joined, or one is too late

    @classmethod
    def create(cls, nbytes: int, device: torch.device, rendezvous: Rendezvous) -> CollectiveBuffer:
        """The sender's buffer. Returns at once and waits for the receivers in the background."""
        store, watch = _listen(rendezvous.address), _listen(rendezvous.address)
        endpoint = {
            "host": rendezvous.address,
            "port": store.getsockname()[1],
            "watch_port": watch.getsockname()[1],
            "token": secrets.token_hex(_TOKEN_BYTES),
            "size": 1 + rendezvous.num_receivers,
            "nbytes": nbytes,
            "timeout_s": rendezvous.timeout_s,
        }
        self = cls(0, endpoint, device, store)
        self._joining = threading.Thread(target=self._join_as_sender, args=(watch,), daemon=True)
        self._joining.start()
        return self

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device, receiver: int) -> CollectiveBuffer:
        """The buffer of receiver number `receiver`. Returns when all members are connected, else ConnectionError."""
        started = time.monotonic()
        try:
            self = cls(1 + receiver, endpoint, device)
            watched = socket.create_connection((endpoint["host"], endpoint["watch_port"]), self._timeout_s)
            watched.settimeout(None)
            watched.sendall(bytes.fromhex(endpoint["token"]))
            self._watch([watched])
            self._store.set(_JOINED.format(receiver), "")
            self._wait_for([_COMPLETE], started)
            self._connect()
        except (dist.DistError, ConnectionRefusedError, ConnectionResetError) as error:
            reason = f"engine rank {receiver} cannot join: the policy's rank 0 has left the group"
            raise ConnectionError(f"{reason}: {first_line(error)}") from error
        return self

    def start(self, half: int, nbytes: int) -> None:
        assert half not in self._works, "the half is in flight"
        if nbytes == 0:
            return
        if self._joining is not None:
            self._met.wait()  # within the limit of the rendezvous, with the names of those that are late
            self._joining.join(self._timeout_s)
            if self._joining.is_alive():
                self._leave(f"after {self._timeout_s:.3g} s the engines had not connected")
            self._joining = None
        first = half * (self.bytes.numel() // NUM_HALVES)
        self._works[half] = self._broadcast(self.bytes[first : first + nbytes])

    def wait(self, half: int) -> None:
        if half in self._works:
            self._finish(self._works.pop(half))

    def close(self) -> None:
        """Leave the group. Members that wait for this one fail at once."""
        self._leave("this process has left the group")
        if self._joining is not None:
            self._joining.join(_CONNECT_S)
            self._joining = None
        self._works.clear()
        self._group = self._store = None  # without the store, members that have not joined yet fail
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _broadcast(self, data: torch.Tensor) -> dist.Work:
        if self._left is not None:
            raise self._leave(self._left)  # after the thread that leaves has aborted the group
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            return self._group.broadcast([data], options)
        except RuntimeError as error:
            raise self._leave(f"{self._gone}: {first_line(error)}") from error

    def _finish(self, work: dist.Work) -> None:
        """Wait for a broadcast.

        NCCL's own wait with a limit sleeps 1 to 10 ms at a time, and counts an aborted broadcast as done.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            while not work.is_completed() and self._left is None:
                if time.monotonic() > deadline:
                    self._leave(f"after {self._timeout_s:.3g} s a broadcast had not ended")
                time.sleep(_STEP_S)
            if self._left is None:
                work.wait()
        except RuntimeError as error:
            raise self._leave(f"{self._gone}: {first_line(error)}") from error
        if self._left is not None:
            raise self._leave(self._left)  # after the thread that leaves has aborted the group

    @property
    def _gone(self) -> str:
        return "the policy's rank 0 or another engine has left" if self._member else "an engine has left"

    def _leave(self, reason: str) -> ConnectionError:
        """End what is in flight, here and, as they notice it, in the other members. Returns the error for `reason`.

        Other members may wait for this one to forward bytes that it never received.
        """
        with self._lock:
            if self._left is None:
                self._left = reason
                for connection in self._watched:
                    with suppress(OSError):  # not connected any more
                        connection.shutdown(socket.SHUT_RDWR)
                    connection.close()
                if self._group is not None:
                    self._group.abort()
            return ConnectionError(self._left)

    def _watch(self, connections: list[socket.socket]) -> None:
        """Leave the group when the other end of one of `connections` does."""
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone closes nothing
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._watched = connections
        poll = select.poll()
        for connection in connections:
            poll.register(connection, select.POLLIN)  # nothing is sent, so only an end is reported

        def wait_for_end() -> None:
            poll.poll()
            self._leave(self._gone)

        threading.Thread(target=wait_for_end, daemon=True).start()

    def _join_as_sender(self, watch: socket.socket) -> None:
        receivers = range(self.endpoint["size"] - 1)
        token, watched = bytes.fromhex(self.endpoint["token"]), []
        try:
            with watch:
                try:
                    self._wait_for([_JOINED.format(number) for number in receivers], time.monotonic())
                finally:
                    self._met.set()
                watch.settimeout(_CONNECT_S)
                while len(watched) < len(receivers):  # each has connected before it joined
                    connection, _ = watch.accept()
                    connection.settimeout(_TOKEN_S)
                    sent = b""
                    with suppress(OSError):  # of a stranger
                        sent = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
                    if sent == token:
                        connection.settimeout(None)
                        watched.append(connection)
                    else:
                        connection.close()
            self._watch(watched)
            self._store.set(_COMPLETE, "")
            self._connect()
        except (ConnectionError, TimeoutError, dist.DistError) as error:  # raised by the next use
            self._leave(first_line(error))

    def _wait_for(self, keys: list[str], started: float) -> None:
        while not self._store.check(keys):
            if self._left is not None:
                raise ConnectionResetError("the group was given up before it was complete")
            if time.monotonic() - started > self._timeout_s:
                late = ", ".join(key for key in keys if not self._store.check([key]))
                raise ConnectionError(f"after {self._timeout_s:.3g} s {late} had not joined")
            time.sleep(_POLL_S)

    def _connect(self) -> None:
        """Make the group, and take part in its first broadcast, in which NCCL connects."""
        if self.bytes.is_cuda:
            torch.cuda.set_device(self.bytes.device)  # of this thread
        group = GROUPS[self.bytes.device.type](self._store, self._member, self.endpoint)
        with self._lock:
            self._group = group
        self._finish(self._broadcast(self.bytes[:1]))


class GlooGroup:
    """A group over gloo, which connects in its first collective, as NCCL does, and fails at once when a member ends."""

    def __init__(self, store: dist.Store, member: int, endpoint: dict[str, Any]) -> None:
        self._members = store, member, endpoint
        self._listeners = set[tuple[str, int]]()

    @cached_property
    def _group(self) -> Any:
        store, member, endpoint = self._members
        gloo: Any = dist.ProcessGroupGloo  # whose stubs are incomplete
        options = gloo._Options()
        own, before = own_address(endpoint["host"], endpoint["port"]), _listening_addresses()
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=min(_CONNECT_S, endpoint["timeout_s"]))
        store.set(f"listeners/{member}", json.dumps(sorted(_listening_addresses() - before)))
        group = gloo(store, member, endpoint["size"], options)
        of_members = [json.loads(store.get(f"listeners/{number}")) for number in range(endpoint["size"])]
        self._listeners = {(host, port) for addresses in of_members for host, port in addresses}
        return group

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        """Cut the connections: gloo's destructor would first wait for members that neither send nor receive."""
        for found in _tcp_sockets():
            with suppress(OSError):  # not connected any more
                if found.getpeername()[:2] in self._listeners or found.getsockname()[:2] in self._listeners:
                    found.shutdown(socket.SHUT_RDWR)


def _nccl_group(store: dist.Store, member: int, endpoint: dict[str, Any]) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=endpoint["timeout_s"])
    # By default a thread of the group ends the whole process at an error. The constructor reads the variable.
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        return dist.ProcessGroupNCCL(store, member, endpoint["size"], options)
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


GROUPS: dict[str, Callable[[Any, int, dict[str, Any]], Any]] = {"cpu": GlooGroup, "cuda": _nccl_group}
"""Type of device -> maker of a group from store, member and endpoint. A group has `broadcast(tensors, options)`, which
may block at first until all members have called it, and `abort()`, which another thread may call."""


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def _tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each under a duplicated descriptor that is closed afterwards."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def _listening_addresses() -> set[tuple[str, int]]:
    return {
        found.getsockname()[:2] for found in _tcp_sockets() if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }
