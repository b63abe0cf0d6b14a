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
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nemo_rl.distributed.collectives import own_address
from nemo_rl.distributed.errors import first_line
from nemo_rl.refit.layout import NUM_HALVES, RefitError, Rendezvous, Transport

if TYPE_CHECKING:
    from torch.distributed import Work

_TOKEN_BYTES = 16
COLLECTIVE_KEY = "collective"
_BACKLOG = 4096
_POLL_S = 0.01
_JOINED, _COMPLETE = "engine rank {}", "other engines"  # keys of the store, which name who has not joined
_CONNECT_S = 120.0  # to connect members that have all just announced themselves


def host_copy_environment() -> dict[str, str]:
    """Environment variables for processes that copy weights in host memory.

    glibc bypasses the caches only for copies above a size that it derives from the last-level cache, hundreds of MiB on
    a server. Below it, the processor reads each line before it writes it, which halves the speed of our chunks. glibc
    reads the variable once, when a process starts. Other C libraries ignore it.
    """
    return {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=524288"}


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


class CudaIpcBuffer(TransferBuffer):
    """Device memory exported once through CUDA IPC; the reader must be on the same physical GPU."""

    def __init__(self, buffer: torch.Tensor, handle: dict[str, Any]) -> None:
        self.bytes, self.endpoint = buffer, handle
        self.key = device_key(buffer.device)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaIpcBuffer:
        """Allocate on `device` and export. One export pairs with one reader: torch counts the references."""
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        reduced: tuple[Any, tuple[Any, ...]] = reduce_tensor(buffer)
        arguments = reduced[1]
        # Of the arguments of `rebuild_cuda_tensor`, only these are unknown to the reader. They travel without a pickle.
        shared = (*arguments[7:10], *arguments[11:15])  # handles of storage, counter and event, sizes and offsets
        shared = [value.hex() if isinstance(value, bytes) else value for value in shared]
        return cls(buffer, {"shared": shared, "tensor_offset": arguments[3], "nbytes": nbytes})

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device) -> CudaIpcBuffer:
        """Map the owner's memory on `device`, the reader's index of the same GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        index = torch.cuda.current_device() if device.index is None else device.index
        size = torch.Size([endpoint["nbytes"]])
        tensor = (torch.Tensor, size, (1,), endpoint["tensor_offset"], torch.storage.TypedStorage, torch.uint8, index)
        shared = [bytes.fromhex(value) if isinstance(value, str) else value for value in endpoint["shared"]]
        requires_grad = False
        return cls(rebuild_cuda_tensor(*tensor, *shared[:3], requires_grad, *shared[3:]), endpoint)

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


# -- a process group between the policy's rank 0 and every engine rank


class CollectiveBuffer(TransferBuffer):
    """A buffer in each member's own memory. A half that the sender fills is broadcast to the same half of the others.

    Member 0 is rank 0 of the policy, member 1 + n is rank n of the engines. The group is independent of the groups in
    which either side computes: gloo between hosts, NCCL between GPUs. Members meet at a key-value store in the sender's
    process, which waits for the others in the background; no member enters a call that it cannot leave before all have
    joined.

    Broadcasts run in the background. Every wait ends after the limit of the rendezvous, or when a member has left, with
    a ConnectionError that names the missing side. A member that ends breaks the group for all; a new sender makes a new
    group.
    """

    def __init__(
        self, member: int, endpoint: dict[str, Any], device: torch.device, listener: socket.socket | None = None
    ) -> None:
        from torch.distributed import TCPStore

        self.bytes = torch.zeros(endpoint["nbytes"], dtype=torch.uint8, device=device)
        self.key = COLLECTIVE_KEY
        self._member = member
        self.endpoint = endpoint
        self._timeout_s: float = endpoint["timeout_s"]
        self._store: Any = TCPStore(  # None after the group was left
            endpoint["host"],
            endpoint["port"],
            is_master=listener is not None,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL, whose stubs are incomplete
        self._listeners: set[tuple[str, int]] = set()  # addresses at which gloo's members accept connections
        self._works: dict[int, Work] = {}  # half -> its broadcast in flight
        self._leaving = threading.Event()
        self._joining: threading.Thread | None = None
        self._failure: Exception | None = None  # why the group could not be made

    @classmethod
    def create(cls, nbytes: int, device: torch.device, rendezvous: Rendezvous) -> CollectiveBuffer:
        """The sender's buffer. Returns at once and waits for the receivers in the background."""
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
        self = cls(0, endpoint, device, listener)
        self._joining = threading.Thread(target=self._join_as_sender, daemon=True)
        self._joining.start()
        return self

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device, receiver: int) -> CollectiveBuffer:
        """The buffer of receiver number `receiver`. Returns when all members have joined, else ConnectionError."""
        from torch.distributed import DistError

        started = time.monotonic()
        try:
            self = cls(1 + receiver, endpoint, device)
            self._store.set(_JOINED.format(receiver), "")
            self._wait_for([_COMPLETE], started)
            self._group = self._connect()
        except DistError as error:
            reason = f"engine rank {receiver} cannot join: the policy's rank 0 has left the group"
            raise ConnectionError(f"{reason}: {first_line(error)}") from error
        return self

    def start(self, half: int, nbytes: int) -> None:
        from torch.distributed import BroadcastOptions

        assert half not in self._works, "the half is in flight"
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

    def wait(self, half: int) -> None:
        if (work := self._works.pop(half, None)) is None:
            return
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            passing = "the policy's rank 0, or an engine that passes its weights on,"
            raise self._broken(f"{passing if self._member else 'an engine'} has left", error) from error

    def close(self) -> None:
        """Leave the group. Members that wait for this one fail at once."""
        self._leaving.set()
        if self._joining is not None:
            self._joining.join()
            self._joining = None
        self._disconnect()
        self._store = self._failure = None  # without the store, the waits of other members end
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _disconnect(self) -> None:
        if self._group is not None and self.bytes.is_cuda:
            self._group.abort()
        else:  # gloo's destructor would first wait for members that neither send nor receive any more
            _shutdown_connections(self._listeners)
        self._works.clear()
        self._group = None

    def _join_as_sender(self) -> None:
        from torch.distributed import DistError

        receivers = range(self.endpoint["size"] - 1)
        try:
            self._wait_for([_JOINED.format(number) for number in receivers], time.monotonic())
            self._store.set(_COMPLETE, "")
            self._group = self._connect()
        except (ConnectionError, DistError) as error:  # raised by the next use
            self._failure = error

    def _wait_for(self, keys: list[str], started: float) -> None:
        while not self._store.check(keys):
            if self._leaving.wait(_POLL_S):
                raise ConnectionError("the group was given up before it was complete")
            if time.monotonic() - started > self._timeout_s:
                late = ", ".join(key for key in keys if not self._store.check([key]))
                raise ConnectionError(f"after {self._timeout_s:.3g} s {late} had not joined")

    def _connect(self) -> Any:
        size = self.endpoint["size"]
        if self.bytes.is_cuda:
            from torch.distributed import ProcessGroupNCCL

            options: Any = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            return ProcessGroupNCCL(self._store, self._member, size, options)
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        own, before = own_address(self.endpoint["host"], self.endpoint["port"]), _listening_addresses()
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=min(_CONNECT_S, self._timeout_s))
        self._store.set(f"listeners/{self._member}", json.dumps(sorted(_listening_addresses() - before)))
        group = gloo(self._store, self._member, size, options)
        of_members = [json.loads(self._store.get(f"listeners/{member}")) for member in range(size)]
        self._listeners = {(host, port) for addresses in of_members for host, port in addresses}
        return group

    def _broken(self, reason: str, error: Exception) -> ConnectionError:
        """Leave the group: other members may wait for this one to forward bytes that it never received."""
        self._disconnect()
        return ConnectionError(f"{reason}: {first_line(error)}")


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


def _shutdown_connections(listeners: set[tuple[str, int]]) -> None:
    """Shut down the connections of this process that were accepted at one of `listeners`."""
    for found in _tcp_sockets():
        with suppress(OSError):  # not connected any more
            if found.getpeername()[:2] in listeners or found.getsockname()[:2] in listeners:
                found.shutdown(socket.SHUT_RDWR)
