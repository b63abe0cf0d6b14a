"""Programs from untrusted text, each in a process of its own that can do nothing but compute and print.

    Program -> SandboxPool.run -> server (one per worker, sandbox_process.py) -> fork -> program -> SandboxResult

A program has a directory of its own to write in, removed when it ends, and `SandboxLimits`. What it cannot do is listed
as `Guarantee`; each is tried out when a pool is made, and a pool that cannot keep one refuses to be made. Standard
library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import secrets
import selectors
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.environments.code.sandbox.limits import (
    GUARANTEES,
    MECHANISMS,
    Guarantee,
    LimitHit,
    Program,
    SandboxLimits,
    SandboxResult,
)

# -- Measuring and removing a directory that somebody else has filled with whatever came to mind.


def disk_use(directory: str, max_files: int) -> tuple[int, int]:
    """(bytes on disk, number of entries) below a directory; counting stops beyond `max_files` entries.

    Its owner is still at work: what is gone by now counts as empty, and what is hidden as beyond `max_files`.
    """
    size = entries = 0
    waiting = [directory]
    while waiting and entries <= max_files:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    if entries > max_files:
                        break
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a path that is too long, a directory that cannot be read: there is no looking into it
            return size, max_files + 1
    return size, entries


def remove_tree(directory: str, *, keep: bool = False) -> None:
    """Remove a directory, or with `keep` only what is in it: neither links, nor depth, nor modes are an obstacle.

    Nobody else may be at work in it. Links are not followed. Directories inside directories are moved up and emptied
    there, so that paths stay short.
    """
    number = 0
    os.chmod(directory, 0o700)
    waiting = [directory]
    while waiting:
        inner = waiting[-1]
        found = False
        with os.scandir(inner) as entries:
            listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in listed:
            path = os.path.join(inner, name)
            if not is_directory:
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            if inner != directory or len(name) > 100:
                number += 1
                moved = os.path.join(directory, f".removed-{os.getpid()}-{number}")
                while os.path.lexists(moved):
                    number += 1
                    moved = os.path.join(directory, f".removed-{os.getpid()}-{number}")
                os.rename(path, moved)
                path = moved
            waiting.append(path)
            found = True
        if not found:
            if inner != directory or not keep:
                os.rmdir(inner)
            waiting.pop()


logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
GRACE_S = 15.0  # beyond the wall limit of a program: then its server hangs
# Users of programs where this process is root: the kernel counts processes per user, so no two servers of a machine may
# share one. Far from accounts and from the ranges of containers, below 2**31.
FIRST_UID, NUM_UIDS = 0x7000_0000, 1 << 28
# For a container that has the first 65536 users alone: few, so that two servers may have the same one.
FIRST_SMALL_UID, NUM_SMALL_UIDS = 20_000, 40_000
MAX_STARTS = 3  # in a row, without an answer in between
PACKAGE_ROOT = str(Path(__file__).parents[4])
BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[2]); from nemo_rl.environments.code.sandbox.process import main; main()"
)
DIRECTORY_PREFIX = "nemo_rl_sandbox_"
PRELOAD = (
    *("collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "random", "re", "statistics", "string", "time", "typing"),
)

PROBE = """
import json, os, socket, sys
canary = sys.stdin.readline().rstrip("\\n")
def works(action):
    try:
        action()
    except OSError:
        return False
    return True
def listing():
    if "canary" not in os.listdir(os.path.dirname(canary)):
        raise PermissionError
def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
parent = os.getppid()
attempts = {
    "network": [lambda: socket.socket(), lambda: socket.socket(socket.AF_UNIX), lambda: socket.socket(socket.AF_UNIX,
        socket.SOCK_DGRAM), lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)],
    "writes": [lambda: open(canary, "a").close(), lambda: os.mkdir(canary + ".d"), lambda: os.truncate(canary, 0),
        lambda: open("../stray", "w").close()],
    "reads": [lambda: open(canary).close(), lambda: open("/proc/self/environ").close(), listing],
    "processes": [fork],
    "signals": [lambda: os.kill(parent, 0), lambda: open(f"/proc/{parent}/mem", "rb").close()],
}
print(json.dumps([name for name, actions in attempts.items() if any([works(action) for action in actions])]))
"""


class SandboxUnavailable(ValueError):
    """This machine does not give what a sandbox rests on."""


class _Server:
    """One server process, used by one thread at a time; started when it is first needed."""

    def __init__(
        self, parent: str, index: int, limits: SandboxLimits, preload: Sequence[str], site_packages: bool
    ) -> None:
        self.directory = os.path.join(parent, str(index))
        self.uids = draw_uids()
        self.limits = limits
        self.preload = list(preload)
        self.site_packages = site_packages
        self.mechanisms: Collection[str] = MECHANISMS
        self.process: subprocess.Popen[bytes] | None = None
        self.selector: selectors.DefaultSelector | None = None
        self.buffer = b""
        self.has: dict[str, Any] = {}

    def run(self, program: Program) -> SandboxResult:
        """What it did. A server that dies or hangs takes its program with it and is replaced."""
        request = {**asdict(program), "token": secrets.token_hex(16)}
        line = json.dumps(request).encode() + b"\n"
        for _ in range(MAX_STARTS):
            self.start()
            try:
                self._send(line)
                reply = json.loads(self._read_line(self.limits.wall_s + GRACE_S))
            except (BrokenPipeError, EOFError):
                self.close()
            except TimeoutError:
                self.close()
                logger.warning("a sandbox server did not answer and was replaced; its program counts as too slow")
                return _no_answer(LimitHit.WALL_TIME, self.limits.wall_s + GRACE_S)
            else:
                limit = reply.pop("limit")
                return SandboxResult(limit=LimitHit(limit) if limit else None, **reply)
        raise RuntimeError(
            f"the sandbox server ended {MAX_STARTS} times while it ran the same program: is the machine out of memory?"
        )

    def _send(self, data: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def start(self) -> None:
        """Make sure that it runs.

        Raises:
            RuntimeError: when it does not start.
        """
        if self.process is not None:
            return
        Path(self.directory).mkdir(mode=0o711, exist_ok=True)
        Path(self.directory).chmod(0o711)  # whatever the umask
        paths = [PACKAGE_ROOT]
        if self.site_packages:
            paths += dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        config = {
            "directory": self.directory,
            "limits": asdict(self.limits),
            "preload": self.preload,
            "library_paths": paths,
            "uids": self.uids,
            "mechanisms": list(self.mechanisms),
        }
        command = [sys.executable, "-s", "-S", "-P", "-c", BOOTSTRAP, json.dumps(config), PACKAGE_ROOT]
        # Nothing of this process's environment: a program might read it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={"LANG": "C.UTF-8", "PATH": os.defpath, "MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"},
        )
        assert self.process.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        try:
            self.has = json.loads(self._read_line(START_TIMEOUT_S))
        except (EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(f"a sandbox server did not start ({error!r}); its error output says why") from error

    def _read_line(self, timeout_s: float) -> bytes:
        assert self.process is not None and self.process.stdout is not None and self.selector is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def close(self) -> None:
        """End the server; a program that runs ends with it, and what it wrote is removed."""
        if self.process is None:
            return
        assert self.selector is not None and self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what was buffered for it has nowhere to go any more
            self.process.stdin.close()
        try:
            self.process.wait(END_TIMEOUT_S)  # it ends with its input, its program first
        except subprocess.TimeoutExpired:
            self.process.kill()  # its program dies with it: PR_SET_PDEATHSIG
            self.process.wait()
        self.selector.close()
        self.process.stdout.close()
        self.process = None
        _remove_when_quiet(self.directory)


def draw_uids() -> list[int]:
    """Users of a server's own, drawn at random: pools of other processes and containers draw from the same ones."""
    return [
        FIRST_UID + secrets.randbelow(NUM_UIDS),
        FIRST_SMALL_UID + secrets.randbelow(NUM_SMALL_UIDS),
    ]


def _remove_when_quiet(directory: str) -> None:
    """Remove a directory in which a process that is being killed may write for another moment."""
    for _ in range(100):
        try:
            remove_tree(directory)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return
    shutil.rmtree(directory)


def _no_answer(limit: LimitHit, duration_s: float) -> SandboxResult:
    return SandboxResult(stdout="", stderr="", exit_status=-9, limit=limit, finished=False, duration_s=duration_s)


class SandboxPool:
    """`num_workers` servers, made ready at once. Results in the order of the programs.

    `site_packages`: programs may import the packages installed beside this one. `preload`: modules that are imported
    already. `allow_weaker`: guarantees that need not be kept. `mechanisms`: those that may be used.

    Raises:
        SandboxUnavailable: when this machine cannot give a guarantee that is not in `allow_weaker`.
    """

    def __init__(
        self,
        num_workers: int,
        limits: SandboxLimits,
        *,
        preload: Sequence[str] = (),
        site_packages: bool = False,
        allow_weaker: Collection[str] = (),
        mechanisms: Collection[str] = MECHANISMS,
    ) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(
                "the sandbox needs Linux: run environments that execute programs on a Linux machine"
            )
        sweep()
        self.directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
        os.chmod(self.directory, 0o711)
        self._lock = os.open(os.path.join(self.directory, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        modules = [*PRELOAD, *preload]
        self._servers = [_Server(self.directory, i, limits, modules, site_packages) for i in range(num_workers)]
        for server in self._servers:
            server.mechanisms = mechanisms
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="sandbox")
        self._idle: queue.SimpleQueue[_Server] = queue.SimpleQueue()
        for server in self._servers:
            self._idle.put(server)
        try:
            self._check({Guarantee(name) for name in allow_weaker})
            for started in [self._threads.submit(server.start) for server in self._servers]:
                started.result()
        except BaseException:
            self.close()
            raise

    def _check(self, allow_weaker: set[Guarantee]) -> None:
        broken = self.probe()
        has = self._servers[0].has
        found = (
            f"Found here: seccomp {_yes(has['seccomp'])}, Landlock {has['landlock'] or 'no'}, namespaces "
            f"{_yes(has['namespaces'])}, programs run as user {os.geteuid() if has['user'] is None else has['user']}."
        )
        missing = broken - allow_weaker
        if missing:
            needs = "; ".join(f"{guarantee}: {GUARANTEES[guarantee]}" for guarantee in sorted(missing))
            raise SandboxUnavailable(
                f"programs cannot be isolated on this machine: {', '.join(sorted(missing))} cannot be guaranteed. "
                f"What it takes: {needs}. {found} Use such a kernel, let the container have these system calls, or, "
                f"where programs are trusted, set sandbox.allow_weaker: [{', '.join(sorted(missing))}]"
            )
        if broken:
            logger.warning("the sandbox does NOT guarantee: %s (sandbox.allow_weaker)", ", ".join(sorted(broken)))
        logger.info("the sandbox guarantees: %s. %s", ", ".join(sorted(set(Guarantee) - broken)), found)

    def probe(self) -> set[Guarantee]:
        """The guarantees that a program can break here, found by a program that tries."""
        canary = Path(self.directory) / "canary"
        canary.write_text("nobody reads this")
        canary.chmod(0o666)
        result = self.run([Program(cells=[PROBE], stdin=f"{canary}\n")])[0]
        canary.unlink()
        if result.exit_status != 0:
            raise RuntimeError(f"the sandbox cannot run its own probe ({result.limit}): {result.stderr[-2000:]}")
        return {Guarantee(name) for name in json.loads(result.stdout)}

    def run(self, programs: Sequence[Program]) -> list[SandboxResult]:
        """Side by side on the workers. May be called from several threads.

        Raises:
            RuntimeError: when servers cannot be started.
        """
        running = [self._threads.submit(self._run_one, program) for program in programs]
        return [future.result() for future in running]

    def _run_one(self, program: Program) -> SandboxResult:
        server = self._idle.get()
        try:
            return server.run(program)
        finally:
            self._idle.put(server)

    def pids(self) -> list[int]:
        """Servers that run now."""
        return [server.process.pid for server in self._servers if server.process is not None]

    def close(self) -> None:
        """End servers and programs, and remove what they wrote."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for server in self._servers:
            server.close()
        os.close(self._lock)
        remove_tree(self.directory)


def _yes(granted: bool) -> str:
    return "yes" if granted else "no"


def sweep() -> None:
    """Remove what pools of this user left behind that were killed: their locks are free."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # being made, or being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove_tree(str(directory))
        finally:
            os.close(lock)
