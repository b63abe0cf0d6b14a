"""Memory that a policy process fills and a generation process on the same node or GPU reads.

Both kinds are created once and reused for every sync: first touch of fresh shared pages costs about twelve times a copy
into pages that are already there, and a CUDA allocation has to be exported and mapped again. A third kind, for
generation on devices of its own, is in `collective_buffer.py`.

    owner:   buffer = SharedMemoryBuffer.create(nbytes);  send buffer.endpoint() once, under buffer.key
    reader:  buffer = SharedMemoryBuffer.attach(endpoint); read buffer.bytes
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Any, Protocol

import torch

_TOKEN_BYTES = 16


def host_copy_environment() -> dict[str, str]:
    """Environment variables that processes which copy weights in host memory should start with.

    glibc streams a copy past the caches only from a size on that it derives from the last-level cache, hundreds of MiB
    on a server; below it, each line written is read first, which halves the speed of the chunks we copy. It reads the
    variable once, when a process starts. Other C libraries ignore it.
    """
    return {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=524288"}


class TransferBuffer(Protocol):
    """`bytes` is the uint8 tensor of all halves; `key` names the place where a reader must be to attach.

    Where both processes see the same memory, whoever tells them that a half is filled or empty is all that is needed,
    and the four calls that say so to the buffer do nothing.
    """

    bytes: torch.Tensor
    key: str

    def endpoint(self) -> dict[str, Any]:
        """What a reader needs to attach; JSON-able."""
        ...

    def await_free(self, half: int) -> None:
        """Sender: wait until what was in the half is on its way. ConnectionError when it cannot go."""

    def filled(self, half: int, nbytes: int) -> None:
        """Sender: the first `nbytes` of the half are there and may go. ConnectionError when they cannot."""

    def expect(self, half: int, nbytes: int) -> None:
        """Receiver: the half is empty, and its next `nbytes` may come."""

    def await_arrival(self, half: int) -> None:
        """Receiver: wait for what is expected. ConnectionError when it cannot come."""

    def close(self) -> None:
        """Let go of the memory. The other side's mapping stays valid until it closes too."""
        ...


def host_key() -> str:
    """Names the set of processes that see one another under /proc: one boot of one kernel, one process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def device_key(device: torch.device) -> str:
    """The physical GPU, whatever index each process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharedMemoryBuffer(TransferBuffer):
    """Anonymous shared memory (memfd), found by a reader through /proc/<pid>/fd/<fd>.

    It has no name, so nobody can guess it and nothing is left behind when the owner is killed; the kernel frees it with
    its last mapping. Only processes of the same user may open it, and its size is sealed. It does not count against the
    size of /dev/shm, which containers keep small.
    """

    def __init__(self, fd: int, nbytes: int, token: bytes) -> None:
        self._fd = fd
        self._token = token
        mapping = mmap.mmap(fd, nbytes + _TOKEN_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)  # keeps the mapping alive
        self.key = host_key()

    @classmethod
    def create(cls, nbytes: int) -> SharedMemoryBuffer:
        """Allocate and touch `nbytes` of shared memory. OSError when the machine has not that much left."""
        fd = os.memfd_create("nemo_rl_weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, nbytes + _TOKEN_BYTES)  # fails here, not by a signal at the first write
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(fd, token, nbytes)
        return cls(fd, nbytes, token)

    @classmethod
    def attach(cls, endpoint: dict[str, Any]) -> SharedMemoryBuffer:
        """Map the owner's memory. ConnectionError when the owner has ended, or its process id means another process."""
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

    def endpoint(self) -> dict[str, Any]:
        """Process, descriptor, size, and the random token that proves the memory to be the one meant."""
        return {"pid": os.getpid(), "fd": self._fd, "nbytes": self.bytes.numel(), "token": self._token.hex()}

    def close(self) -> None:
        """Close the descriptor and drop the mapping; the pages go with the last tensor that views them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.bytes = torch.empty(0, dtype=torch.uint8)


class CudaIpcBuffer(TransferBuffer):
    """Device memory exported once through CUDA IPC; the reader must sit on the same physical GPU."""

    def __init__(self, buffer: torch.Tensor, handle: dict[str, Any]) -> None:
        self.bytes = buffer
        self._handle = handle
        self.key = device_key(buffer.device)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaIpcBuffer:
        """Allocate on `device` and export. One export pairs with one reader: torch counts the references."""
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        reduced: tuple[Any, tuple[Any, ...]] = reduce_tensor(buffer)
        arguments = reduced[1]
        # Of the arguments of `rebuild_cuda_tensor` only these are not known to the reader: no pickle on the way.
        names = (
            "storage_handle",
            "storage_bytes",
            "storage_offset",
            "counter",
            "counter_offset",
            "event",
            "event_sync",
        )
        values = (*arguments[7:10], *arguments[11:15])
        handle = {n: v.hex() if isinstance(v, bytes) else v for n, v in zip(names, values, strict=True)}
        return cls(buffer, {**handle, "tensor_offset": arguments[3], "nbytes": nbytes})

    @classmethod
    def attach(cls, endpoint: dict[str, Any], device: torch.device) -> CudaIpcBuffer:
        """Map the owner's memory on `device`, the reader's index of the same GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        index = torch.cuda.current_device() if device.index is None else device.index
        buffer = rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size([endpoint["nbytes"]]),
            (1,),
            endpoint["tensor_offset"],
            torch.storage.TypedStorage,
            torch.uint8,
            index,
            bytes.fromhex(endpoint["storage_handle"]),
            endpoint["storage_bytes"],
            endpoint["storage_offset"],
            False,
            bytes.fromhex(endpoint["counter"]),
            endpoint["counter_offset"],
            bytes.fromhex(endpoint["event"]),
            endpoint["event_sync"],
        )
        return cls(buffer, endpoint)

    def endpoint(self) -> dict[str, Any]:
        """The exported handle, as hexadecimal text and numbers."""
        return self._handle

    def close(self) -> None:
        """Drop the memory (owner) or the mapping (reader)."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
