"""The server behind a `Sandbox`: a small interpreter that forks once per program and watches over the child.

It is started with one JSON object as its argument (`ServerConfig`) and talks in JSON lines: a `Program` in, a
`SandboxResult` out; the first line out says what the sandbox can guarantee here. It ends with its standard input, and
takes the program and its directory with it. Standard library only: it stays small, so that it forks quickly.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from nemo_rl.environments.code.sandbox import isolation as sandbox_namespaces
from nemo_rl.environments.code.sandbox import program as sandbox_program
from nemo_rl.environments.code.sandbox.isolation import (
    PR_SET_CHILD_SUBREAPER,
    SyscallFilter,
    die_with,
    drop_privileges,
    drop_user,
    landlock_abi,
    prctl,
    restrict_files,
    set_limits,
)
from nemo_rl.environments.code.sandbox.limits import LimitHit, SandboxLimits
from nemo_rl.environments.code.sandbox.sandbox import disk_use, remove_tree

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
FIRST_TICK_S, LONGEST_TICK_S = 0.001, 0.02
PIPES = ("stdout", "stderr", "status")
READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server is told when it starts."""

    directory: str  # its own: programs get directories in it
    limits: dict[str, Any]  # of SandboxLimits
    preload: list[str]  # modules that programs find imported
    library_paths: list[str]  # where programs may import from besides the standard library
    uids: list[int]  # users to become where the server is root: the first one that can read Python is taken
    mechanisms: list[str]  # of sandbox_limits.MECHANISMS: which ones may be used


class Server:
    """One program at a time."""

    def __init__(self, config: ServerConfig) -> None:
        self.limits = SandboxLimits(**config.limits)
        self.directory = config.directory
        self.work = os.path.join(self.directory, "work")
        self.readable = [*SYSTEM_FILES, *dict.fromkeys(p for p in sys.path if os.path.isdir(p))]
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # it stays in reach when the namespace has none
        self.namespaces = "namespaces" in config.mechanisms and self._enter_namespaces()
        self.abi = landlock_abi() if "landlock" in config.mechanisms else 0
        self.filter = self._syscall_filter() if "seccomp" in config.mechanisms else None
        uids = config.uids if "user" in config.mechanisms and os.geteuid() == 0 else []
        self.uid = next((uid for uid in uids if can_become(uid)), None)

    def _enter_namespaces(self) -> bool:
        def enter() -> None:
            sandbox_namespaces.enter(
                directory=self.directory,
                own=self.work,
                readable=self.readable,
                devices=DEVICES,
                size=self.limits.disk_bytes,
                files=self.limits.files,
            )

        granted = in_child(enter)
        remove_tree(os.path.join(self.directory, "root"))
        if granted:
            enter()
        return granted

    @staticmethod
    def _syscall_filter() -> SyscallFilter | None:
        made = SyscallFilter()

        def install() -> None:
            drop_privileges()
            made.install()

        return made if in_child(install) else None

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Fork, watch, clean up."""
        if not self.namespaces:
            os.mkdir(self.work, 0o700)
        if self.uid is not None:
            os.chown(self.work, self.uid, self.uid)
        try:
            return self._watched(request)
        finally:
            remove_tree(self.work, keep=self.namespaces)  # there it is a file system of its own

    def _watched(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(request["stdin"].encode("utf-8", errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in PIPES}
        server = os.getpid()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_program(request, stdin, {name: write for name, (_, write) in pipes.items()}, server)
            finally:  # whatever went wrong on the way in: nothing of the server may run in the child
                os._exit(125)
        os.close(stdin)
        for _, write in pipes.values():
            os.close(write)
        watch = _Watch(
            pid, {name: read for name, (read, _) in pipes.items()}, self.limits, self.work, self.proc, started
        )
        try:
            watch.run()
        finally:
            watch.end()
        return watch.result(request["token"])

    def _become_program(self, request: dict[str, Any], stdin: int, ends: dict[str, int], server: int) -> None:
        os.setsid()
        wanted = [stdin, ends["stdout"], ends["stderr"], ends["status"]]
        high = [os.dup2(fd, 100 + i) for i, fd in enumerate(wanted)]  # out of the way of 0 to 3
        for i, fd in enumerate(high):
            os.dup2(fd, i)
        os.closerange(4, 1 << 12)
        os.chdir(self.work)
        os.umask(0o077)
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.default_int_handler)
        set_limits(self.limits, exact_threads=self.uid is not None)
        if self.uid is not None:
            drop_user(self.uid)
        die_with(server)
        drop_privileges()
        if self.abi:
            restrict_files(abi=self.abi, readable=self.readable, devices=DEVICES, own_directory=self.work)
        if self.filter is not None:
            self.filter.install()
        sandbox_program.run(request, 3)


class _Watch:
    """One running child: what it has written so far, and when it is enough."""

    def __init__(
        self, pid: int, pipes: dict[str, int], limits: SandboxLimits, work: str, proc: int, started: float
    ) -> None:
        self.pid = pid
        self.limits = limits
        self.work = work
        self.proc = proc
        self.started = started
        self.output = {name: bytearray() for name in pipes}
        self.names = {fd: name for name, fd in pipes.items()}
        self.poll = select.poll()
        for fd in self.names:
            self.poll.register(fd, select.POLLIN)
        self.poll.register(0, select.POLLRDHUP)  # the other side of the server has gone
        self.limit: LimitHit | None = None
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.duration_s = 0.0

    def run(self) -> None:
        """Until it has ended, or has reached a limit."""
        tick = FIRST_TICK_S
        while not self._has_ended():
            if self.limit is not None:
                return
            for fd, _ in self.poll.poll(tick * 1000):
                if fd == 0:
                    raise EOFError
                self._read(fd)
                tick = FIRST_TICK_S
            tick = min(tick * 2, LONGEST_TICK_S) if self.names else FIRST_TICK_S
            self._check(tick)
        while self.names and self.limit is None:  # what is left in the pipes
            ready = self.poll.poll(0)
            if not ready:
                break
            for fd, _ in ready:
                if fd == 0:
                    raise EOFError
                self._read(fd)

    def _has_ended(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == self.pid:
            self.status, self.usage = status, usage
        return self.status is not None

    def _read(self, fd: int) -> None:
        data = os.read(fd, READ_BYTES)
        if not data:
            self._close(fd)
            return
        name = self.names[fd]
        kept = self.output[name]
        kept += data
        if name == "status":
            if len(kept) > READ_BYTES:
                self.limit = LimitHit.OUTPUT
        elif sum(len(self.output[n]) for n in ("stdout", "stderr")) > self.limits.output_bytes:
            self.limit = LimitHit.OUTPUT

    def _close(self, fd: int) -> None:
        self.poll.unregister(fd)
        os.close(fd)
        del self.names[fd]

    def _check(self, tick: float) -> None:
        if time.monotonic() - self.started > self.limits.wall_s:
            self.limit = LimitHit.WALL_TIME
        elif tick == LONGEST_TICK_S and self.limit is None:
            if num_threads(self.proc, self.pid) > self.limits.threads:
                self.limit = LimitHit.THREADS
            size, files = disk_use(self.work, self.limits.files)
            if size > self.limits.disk_bytes or files > self.limits.files:
                self.limit = LimitHit.DISK

    def end(self) -> None:
        """Nothing of it runs any more."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _, self.status, self.usage = os.wait4(self.pid, 0)
        self.duration_s = time.monotonic() - self.started
        end_orphans(self.proc)
        for fd in list(self.names):
            self._close(fd)

    def result(self, token: str) -> dict[str, Any]:
        """The fields of SandboxResult, from what is certain first and from what the child says last."""
        assert self.status is not None and self.usage is not None
        exit_status = os.waitstatus_to_exitcode(self.status)
        facts = _facts(bytes(self.output["status"]), token)
        limit = self.limit
        used_s = self.usage.ru_utime + self.usage.ru_stime
        if limit is None and exit_status in (-signal.SIGXCPU, -signal.SIGKILL) and used_s > self.limits.cpu_s - 0.5:
            limit = LimitHit.CPU_TIME
        if limit is None and exit_status == -signal.SIGXFSZ:
            limit = LimitHit.FILE_SIZE
        if limit is None and exit_status < 0 and self.usage.ru_maxrss * 1024 > 0.8 * self.limits.memory_bytes:
            limit = LimitHit.MEMORY
        if limit is None and exit_status != 0:
            limit = facts.get("limit")
        text = {n: bytes(self.output[n]) for n in ("stdout", "stderr")}
        left = self.limits.output_bytes
        for name, data in text.items():
            text[name] = data[:left]
            left -= len(text[name])
        return {
            "stdout": text["stdout"].decode("utf-8", errors="replace"),
            "stderr": text["stderr"].decode("utf-8", errors="replace"),
            "exit_status": exit_status,
            "limit": limit,
            "finished": exit_status == 0 and self.limit is None and bool(facts.get("finished")),
            "duration_s": self.duration_s,
            "error": facts.get("error", ""),
            "failed_cell": facts.get("failed_cell"),
        }


def _facts(data: bytes, token: str) -> dict[str, Any]:
    """What the first line with the request's token says; values of another type than the runner's count as not said.

    A line without the token is not from the runner. The converse does not hold: the program shares the runner's process
    and can find the token there.
    """
    for line in data.splitlines():
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(facts, dict) and facts.get("token") == token:
            limit, error, failed_cell = facts.get("limit"), facts.get("error"), facts.get("failed_cell")
            return {
                "finished": facts.get("finished") is True,
                "error": error if isinstance(error, str) else "",
                "limit": limit if isinstance(limit, str) and limit in set(LimitHit) else None,
                "failed_cell": failed_cell if type(failed_cell) is int else None,  # a bool is none
            }
    return {}


def stat_fields(proc: int, pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on, or nothing where there is no such process."""
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc), "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def num_threads(proc: int, pid: int) -> int:
    """Threads of a process; 0: it has ended."""
    fields = stat_fields(proc, pid)
    return int(fields[17]) if fields else 0


def end_orphans(proc: int) -> None:
    """End whatever the program has left behind: where guarantees are waived, its descendants come to this process."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for child in children(proc):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(FIRST_TICK_S)


def children(proc: int) -> list[int]:
    """Processes whose parent this one is."""
    own = str(os.getpid()).encode()
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        pids = [int(name) for name in os.listdir(listing) if name.isdigit()]
    finally:
        os.close(listing)
    return [pid for pid in pids if stat_fields(proc, pid)[1:2] == [own]]


def in_child(action: Any) -> bool:
    """Whether `action()` works, tried in a process that ends with it."""
    pid = os.fork()
    if pid == 0:
        worked = 1
        try:
            action()
            worked = 0
        finally:
            os._exit(worked)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def can_become(uid: int) -> bool:
    """Whether this process may become that user, and still read Python's library then."""

    def action() -> None:
        drop_user(uid)
        for path in sys.path:
            if os.path.isdir(path) or not path.endswith(".zip"):
                os.listdir(path)

    return in_child(action)


def serve(config: ServerConfig, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until there are no more requests."""
    server = Server(config)
    ready = {
        "namespaces": server.namespaces,
        "landlock": server.abi,
        "seccomp": server.filter is not None,
        "user": server.uid,
    }
    replies.write(json.dumps(ready).encode() + b"\n")
    replies.flush()
    for line in iter(requests.readline, b""):
        try:
            reply = server.run(json.loads(line))
        except EOFError:
            return
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def main() -> None:
    config = ServerConfig(**json.loads(sys.argv[1]))
    sys.path[:] = [path for path in sys.path if path not in ("", config.library_paths[0])] + config.library_paths[1:]
    for name in config.preload:
        importlib.import_module(name)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the run, which ends its servers
    # Out of the way of 1 and 2, which are those of programs.
    with open(0, "rb", buffering=0, closefd=False) as requests, open(os.dup(1), "wb") as replies:
        gc.collect()
        gc.freeze()
        gc.disable()
        serve(config, requests, replies)


if __name__ == "__main__":
    main()
