"""The server of a sandbox: a small interpreter that forks once per program and watches the child.

It is started with one JSON object as its argument (see `main`). It reads a `Program` and writes a `SandboxResult`,
both as JSON lines; its first line lists the mechanisms of isolation that it has. It ends with its standard input, and
removes the program and its directory. Standard library only: it stays small, so that it forks quickly.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import platform
import resource
import select
import signal
import stat
import sys
import time
from types import SimpleNamespace
from typing import Any

from nemo_rl.environments.code.sandbox import isolation
from nemo_rl.environments.code.sandbox.program import LimitHit
from nemo_rl.environments.code.sandbox.program import run as run_program

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM_FILES = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /etc/ld.so.cache /etc/localtime /usr/share/zoneinfo"
FIRST_TICK_S, LONGEST_TICK_S = 0.001, 0.02
PIPES = ("stdout", "stderr", "status")
READ_BYTES = 1 << 16


class Server:
    """Runs one program at a time.

    `limits` are the keys of SandboxConfig, `mechanisms` the names of program.MECHANISMS that may be used. If the
    server is root, programs become the first of the users `uids` that can read Python.
    """

    def __init__(self, directory: str, limits: dict[str, Any], uids: list[int], mechanisms: list[str]) -> None:
        self.limits = SimpleNamespace(**limits)
        self.directory = directory
        self.work = os.path.join(self.directory, "work")
        self.readable = [*SYSTEM_FILES.split(), *dict.fromkeys(p for p in sys.path if os.path.isdir(p))]
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # stays open: the namespace has no /proc
        self.namespaces = "namespaces" in mechanisms and in_child(self._enter_namespaces)
        if os.path.isdir(root := os.path.join(self.directory, "root")):  # left by the trial
            remove_tree(root)
        if self.namespaces:
            self._enter_namespaces()
        self.abi = isolation.landlock_abi() if "landlock" in mechanisms else 0
        self.filter = isolation.build_filter(platform.machine()) if "seccomp" in mechanisms else None
        if not in_child(self._install_filter):
            self.filter = None
        candidates = uids if "user" in mechanisms and os.geteuid() == 0 else []
        self.uid = next((uid for uid in candidates if can_become(uid)), None)

    def _enter_namespaces(self) -> None:
        isolation.enter(
            directory=self.directory,
            own=self.work,
            readable=self.readable,
            devices=DEVICES,
            size=self.limits.max_disk_mib << 20,
            files=self.limits.max_files,
        )

    def _install_filter(self) -> None:
        isolation.drop_privileges()
        if self.filter is not None:
            isolation.install_filter(self.filter)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one program: fork, watch, clean up."""
        if not self.namespaces:
            os.mkdir(self.work, 0o700)
        if self.uid is not None:
            os.chown(self.work, self.uid, self.uid)
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(request["stdin"].encode("utf-8", errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in PIPES}
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_program(request, stdin, {name: write for name, (_, write) in pipes.items()}, server)
            finally:  # after an error on the way in, no code of the server may run in the child
                os._exit(125)
        os.close(stdin)
        for _, write in pipes.values():
            os.close(write)
        watch = _Watch(self, pid, {read: name for name, (read, _) in pipes.items()})
        try:
            watch.run()
        finally:
            watch.end()
            remove_tree(self.work, keep=self.namespaces)  # a namespace has it as a file system of its own
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
        isolation.set_limits(self.limits, exact_threads=self.uid is not None)
        if self.uid is not None:
            isolation.drop_user(self.uid)
        isolation.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)
        isolation.drop_privileges()
        if self.abi:
            places = {"readable": self.readable, "writable": [self.work], "devices": DEVICES}
            isolation.restrict(abi=self.abi, **places, ports=(), runs_programs=False)
        if self.filter is not None:
            isolation.install_filter(self.filter)
        run_program(request, 3)


class _Watch:
    """One running child: its output so far, and the limit that it has reached."""

    def __init__(self, server: Server, pid: int, names: dict[int, str]) -> None:
        self.pid, self.started = pid, time.monotonic()
        self.inspected = self.started  # the end of the last look at its files and threads
        self.limits, self.work, self.proc = server.limits, server.work, server.proc
        self.names = names  # of the pipes that are open, by file descriptor
        self.output = {name: bytearray() for name in PIPES}
        self.poll = select.poll()
        for fd in self.names:
            self.poll.register(fd, select.POLLIN)
        self.poll.register(0, select.POLLRDHUP)  # the other side has closed the server's input
        self.limit: LimitHit | None = None
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None

    def run(self) -> None:
        """Watch until it has ended or reached a limit."""
        tick = FIRST_TICK_S
        while not self._has_ended():
            if self.limit is not None:
                return
            tick = FIRST_TICK_S if self._read_ready(tick * 1000) else tick
            tick = min(tick * 2, LONGEST_TICK_S) if self.names else FIRST_TICK_S
            self._check()
        while self.names and self.limit is None and self._read_ready(0):  # what is left in the pipes
            pass

    def _read_ready(self, timeout_ms: float) -> bool:
        """Read the pipes that have something. EOFError when the server is to end."""
        ready = self.poll.poll(timeout_ms)
        for fd, _ in ready:
            if fd == 0:
                raise EOFError
            data = os.read(fd, READ_BYTES)
            self.output[self.names[fd]] += data
            if not data:
                self._close(fd)
        printed = len(self.output["stdout"]) + len(self.output["stderr"])
        if printed > self.limits.max_output_bytes or len(self.output["status"]) > READ_BYTES:
            self.limit = LimitHit.OUTPUT
        return bool(ready)

    def _has_ended(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == self.pid:
            self.status, self.usage = status, usage
        return self.status is not None

    def _close(self, fd: int) -> None:
        self.poll.unregister(fd)
        os.close(fd)
        del self.names[fd]

    def _check(self) -> None:
        if time.monotonic() - self.started > self.limits.time_limit_s:
            self.limit = LimitHit.WALL_TIME
        # By the clock: who prints keeps the ticks short.
        elif time.monotonic() - self.inspected > LONGEST_TICK_S and self.limit is None:
            fields = stat_fields(self.proc, self.pid)
            if fields and int(fields[17]) > self.limits.max_threads:
                self.limit = LimitHit.THREADS
            size, files = disk_use(self.work, self.limits.max_files)
            if size > self.limits.max_disk_mib << 20 or files > self.limits.max_files:
                self.limit = LimitHit.DISK
            self.inspected = time.monotonic()

    def end(self) -> None:
        """End the child and its descendants."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _, self.status, self.usage = os.wait4(self.pid, 0)
        end_orphans(self.proc)
        for fd in list(self.names):
            self._close(fd)

    def result(self, token: str) -> dict[str, Any]:
        """The fields of SandboxResult: from certain facts first, from the child's own report last."""
        assert self.status is not None and self.usage is not None
        exit_status = os.waitstatus_to_exitcode(self.status)
        finished, told = _facts(bytes(self.output["status"]), token)
        limit = self.limit
        used_s = self.usage.ru_utime + self.usage.ru_stime
        used_up = used_s > self.limits.cpu_limit_s - 0.5
        if limit is None and exit_status in (-signal.SIGXCPU, -signal.SIGKILL) and used_up:
            limit = LimitHit.CPU_TIME
        if limit is None and exit_status == -signal.SIGXFSZ:
            limit = LimitHit.FILE_SIZE
        if limit is None and exit_status < 0 and self.usage.ru_maxrss > 0.8 * 1024 * self.limits.memory_mib:
            limit = LimitHit.MEMORY
        if limit is None and exit_status != 0:
            limit = told
        stdout = self.output["stdout"][: self.limits.max_output_bytes]
        stderr = self.output["stderr"][: self.limits.max_output_bytes - len(stdout)]
        return {
            "stdout": stdout.decode("utf-8", errors="replace"),
            "stderr": stderr.decode("utf-8", errors="replace"),
            "exit_status": exit_status,
            "limit": limit,
            "finished": exit_status == 0 and self.limit is None and finished,
        }


def _facts(data: bytes, token: str) -> tuple[bool, str | None]:
    """The child's report, (finished, limit): the first line with the request's token. Wrong types are ignored.

    A line without the token is not from the runner. A line with the token may still be from the program, which shares
    the runner's process and can find the token there.
    """
    for line in data.splitlines():
        facts = None
        with contextlib.suppress(ValueError, RecursionError):
            facts = json.loads(line)
        if isinstance(facts, dict) and facts.get("token") == token:
            limit = facts.get("limit")
            known = limit if isinstance(limit, str) and limit in set(LimitHit) else None
            return facts.get("finished") is True, known
    return False, None


def stat_fields(proc: int, pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on; nothing if there is no such process."""
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc), "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def end_orphans(proc: int) -> None:
    """End processes that the program has left: without guarantees, its descendants become children of this process."""
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
    """The children of this process."""
    own = str(os.getpid()).encode()
    pids = [int(name) for name in os.listdir(proc) if name.isdigit()]
    return [pid for pid in pids if stat_fields(proc, pid)[1:2] == [own]]


def in_child(action: Any) -> bool:
    """Whether `action()` works, tried in a process that ends with it."""
    pid = os.fork()
    if pid == 0:
        exit_status = 1
        try:
            action()
            exit_status = 0
        finally:
            os._exit(exit_status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def can_become(uid: int) -> bool:
    """Whether this process may become that user, and still read Python's library then."""

    def action() -> None:
        isolation.drop_user(uid)
        for path in sys.path:
            if os.path.isdir(path) or not path.endswith(".zip"):
                os.listdir(path)

    return in_child(action)


def disk_use(directory: str, max_files: int) -> tuple[int, int]:
    """(bytes on disk, number of entries) below a directory; counting stops beyond `max_files` entries.

    The program may still write: an entry that has disappeared counts as empty, a hidden one as beyond `max_files`.
    """
    size = entries = 0
    waiting = [directory]
    while waiting and entries <= max_files:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in itertools.islice(found, max_files + 1 - entries):
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a path that is too long, or a directory that cannot be read
            return size, max_files + 1
    return size, entries


def remove_tree(directory: str, *, keep: bool = False) -> None:
    """Remove a directory, or with `keep` only its contents. Links, depth and modes inside do not matter.

    No other process may use it. Links are not followed. Directories inside directories are moved up and emptied there,
    so that paths stay short.
    """
    names = (os.path.join(directory, f".removed-{os.getpid()}-{number}") for number in itertools.count())
    os.chmod(directory, 0o700)
    waiting = [directory]
    while waiting:
        inner = waiting[-1]
        with os.scandir(inner) as entries:
            listed = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_directory in listed:
            if not is_directory:
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            if inner != directory or len(os.path.basename(path)) > 100:
                moved = next(name for name in names if not os.path.lexists(name))
                os.rename(path, moved)
                path = moved
            waiting.append(path)
        if waiting[-1] == inner:  # no directory is left in it
            if inner != directory or not keep:
                os.rmdir(inner)
            waiting.pop()


def main() -> None:
    """`preload`: modules to import before programs start. `library_paths`: where programs may import from, besides the
    standard library; the first path leads to this package and is for the server only. Other keys: see `Server`."""
    config = json.loads(sys.argv[1])
    own, *others = config.pop("library_paths")
    sys.path[:] = [path for path in sys.path if path not in ("", own)] + others
    for name in config.pop("preload"):
        importlib.import_module(name)
    isolation.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal ends the run, which ends its servers
    # Replies go to a copy of 1: programs use 1 and 2.
    with open(0, "rb", buffering=0, closefd=False) as requests, open(os.dup(1), "wb") as replies:
        gc.collect()
        gc.freeze()
        gc.disable()
        server = Server(**config)
        has = {"namespaces": server.namespaces, "landlock": server.abi, "seccomp": server.filter is not None}
        reply: dict[str, Any] = {**has, "user": server.uid}
        while True:
            replies.write(json.dumps(reply).encode() + b"\n")
            replies.flush()
            if not (line := requests.readline()):
                return
            try:
                reply = server.run(json.loads(line))
            except EOFError:
                return


if __name__ == "__main__":
    main()
