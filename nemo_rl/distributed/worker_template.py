"""Workers of a cluster of this machine, forked from one process that has imported their libraries.

Ray starts each worker as a new Python, which imports Ray, torch and transformers: about four seconds of a core, for
half a dozen workers in every run and for each that is replaced. On a machine without GPUs, Ray's program for a new
worker (`virtual_cluster`) asks a template instead. It has imported them once, while Ray started, and forks: a worker is
ready at once and shares the memory of the libraries. `multiprocessing` calls this a fork server.

A template has one thread and has computed nothing. Libraries read some variables of the environment when they are
loaded: a worker that is given other values than `HOST_ENVIRONMENT` starts as a new Python, and so does one with a
Python of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from typing import Any, NoReturn

# Waiting threads that spin slow each other down twentyfold on a busy machine; threads that sleep immediately halve the
# speed of small models. So they spin for microseconds (GNU's OpenMP), then sleep. A worker that computes on several
# threads asks torch for them.
_THREADS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "5000",
}
# glibc bypasses the caches only for copies above a size that it derives from the last-level cache, hundreds of MiB on a
# server. Below it, the processor reads each line before it writes it, which halves the speed of our chunks. And glibc
# keeps the memory that a micro-batch frees for the next one: it would return it to the system, and each page that comes
# back costs a fault, a tenth of a step of 18M parameters. Further arenas it empties whatever the threshold. Huge pages
# make products of large weights a fifth faster, as most of their time is reading, and the processor finds the addresses
# of few pages at once. Other C libraries ignore the variable. Python keeps its objects in this memory too: in a virtual
# machine that finds pages slowly, an import of vLLM takes 17 to 23 s instead of 30 to 120.
_TUNABLES = ("cpu.x86_non_temporal_threshold=524288", "malloc.arena_max=1")
_TUNABLES += (f"malloc.mmap_threshold={2**30}", f"malloc.trim_threshold={2**32}")
HUGE_PAGES = "glibc.malloc.hugetlb=1"
# Libraries print notes on CUDA and NUMA in every process, which mean nothing on a CPU machine.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning", "TORCH_LOGS": "-all"}

HOST_ENVIRONMENT = {
    **_THREADS,
    **_QUIET,
    "GLIBC_TUNABLES": ":".join([*(f"glibc.{tunable}" for tunable in _TUNABLES), HUGE_PAGES]),
    "PYTHONMALLOC": "malloc",
}
"""The environment of workers that compute on the host and copy weights in its memory."""

READ_WHEN_LOADED = ("OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "OPENBLAS_", "GLIBC_", "MALLOC_", "LD_", "PYTHON")
READ_WHEN_LOADED += ("TORCH", "PYTORCH", "HF_", "TRANSFORMERS_")
"""Prefixes of such variables. PYTHONPATH is not one: a forked worker takes its own."""

# Not Ray: its library reads the environment of a worker when it is loaded, which takes a third of a second.
_PRELOADED = (
    *("torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "transformers.models.auto.auto_factory"),
    *("aiohttp", "pydantic", "grpc", "google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "yaml"),
)
_LENGTH = struct.Struct("!I")
_BACKLOG = 256


class WorkerTemplate:
    """The process that forks, as its parent sees it. It ends when `close` is called or the parent ends.

    `address` is that of its socket in Linux's abstract namespace. `environment` has its variables that libraries read
    when they are loaded.
    """

    def __init__(self) -> None:
        self.address = f"nemo_rl_workers_{secrets.token_hex(16)}"
        variables = {**os.environ, **HOST_ENVIRONMENT}
        self.environment = {name: value for name, value in variables.items() if is_read_when_loaded(name)}
        command = [sys.executable, "-m", __name__, self.address]
        # A session of its own: Ctrl-C ends the run, which ends its workers.
        self._process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End it, whatever it does; workers that it has forked go on."""
        self._process.kill()
        self._process.wait()


def is_read_when_loaded(name: str) -> bool:
    return name.startswith(READ_WHEN_LOADED) and name != "PYTHONPATH"


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The program of a worker (`argv`, `env`, `cwd`), and its standard streams."""
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    [length] = _LENGTH.unpack(head)
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the program that asked for a worker has ended")
        data += part
    return json.loads(data), streams


def _become_worker(connection: socket.socket, packages: list[str]) -> NoReturn:
    """Run Ray's program of a worker in this process, which has just been forked. `connection` stays open until it ends.

    `packages`: the part of `sys.path` that does not come from PYTHONPATH.
    """
    os.setpgid(0, 0)  # Ray kills the group of a worker
    asked, streams = _receive(connection)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = asked["argv"]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *own, *packages]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def main() -> None:
    """Import, then fork a worker for each connection, until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in sys.path if path not in ("", os.getcwd(), *own)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{sys.argv[1]}")
        listener.listen(_BACKLOG)
        gc.disable()
        for name in _PRELOADED:
            importlib.import_module(name)
        gc.freeze()  # a collection touches, and so copies, no page that workers share
        gc.enable()
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.geteuid() and os.fork() == 0:
                listener.close()
                _become_worker(connection, packages)
            connection.close()


if __name__ == "__main__":
    main()
