"""Programs from untrusted text, each in a process of its own that can do nothing but compute and print.

    Program -> SandboxPool.run -> server (one per worker, process.py) -> fork -> program (program.py) -> SandboxResult

A program has a directory of its own to write in, removed when it ends, and the limits of `SandboxConfig`. A pool tries
out every `Guarantee` when it is made, and raises if the machine cannot keep one. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.code.sandbox.process import remove_tree
from nemo_rl.environments.code.sandbox.program import (
    GUARANTEES,
    MECHANISMS,
    Guarantee,
    LimitHit,
    Program,
    SandboxResult,
)
from nemo_rl.environments.line_process import LineProcess, LineWorker, WorkerPool
from nemo_rl.utils.bytecode import interpreter_options

if TYPE_CHECKING:
    from nemo_rl.environments.section_parts import SandboxConfig

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
GRACE_S = 15.0  # beyond the wall limit of a program; after it the server itself hangs
# Users of programs if this process is root: the kernel counts processes per user, so no two servers of a machine may
# share one. Far from accounts and from the ranges of containers, below 2**31.
FIRST_UID, NUM_UIDS = 0x7000_0000, 1 << 28
# For a container that has the first 65536 users only: so few that two servers may draw the same one.
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


class _Server(LineWorker[Program, SandboxResult]):
    def __init__(self, directory: str, cfg: SandboxConfig, mechanisms: Collection[str]) -> None:
        # Several: an environment of requirements shows the packages of the run below its own.
        of_packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        paths = of_packages if cfg.site_packages else []
        self.directory = directory
        self.patience_s = cfg.time_limit_s + GRACE_S
        # Drawn at random, as pools of other processes and containers draw from the same ranges.
        uids = [FIRST_UID + secrets.randbelow(NUM_UIDS), FIRST_SMALL_UID + secrets.randbelow(NUM_SMALL_UIDS)]
        self.config = {
            "directory": directory,
            "limits": vars(cfg),
            "uids": uids,
            "mechanisms": list(mechanisms),
            "preload": [*PRELOAD, *cfg.preload],
            "library_paths": [PACKAGE_ROOT, *dict.fromkeys(paths)],
        }
        self.has: dict[str, Any] = {}  # mechanism -> whether this machine grants it

    def run(self, program: Program) -> SandboxResult:
        """Run a program. A server that dies or hangs takes its program with it and is replaced."""
        line = json.dumps({**asdict(program), "token": secrets.token_hex(16)}).encode()
        for _ in range(MAX_STARTS):
            lines = self.start()
            try:
                lines.send(line)
                reply = json.loads(lines.receive(self.patience_s))
            except (BrokenPipeError, EOFError):
                self.close()
            except TimeoutError:
                self.close()
                logger.warning("a sandbox server did not answer and was replaced; its program counts as too slow")
                return SandboxResult(stdout="", stderr="", exit_status=-9, limit=LimitHit.WALL_TIME, finished=False)
            else:
                limit = reply.pop("limit")
                return SandboxResult(limit=LimitHit(limit) if limit else None, **reply)
        raise RuntimeError(
            f"the sandbox server ended {MAX_STARTS} times while it ran the same program: is the machine out of memory?"
        )

    def start(self) -> LineProcess:
        """The running process. RuntimeError when it does not start."""
        if self.lines is not None:
            return self.lines
        Path(self.directory).mkdir(mode=0o711, exist_ok=True)
        Path(self.directory).chmod(0o711)  # whatever the umask
        python = [sys.executable, "-s", "-S", "-P", *interpreter_options()]
        command = [*python, "-c", BOOTSTRAP, json.dumps(self.config), PACKAGE_ROOT]
        # Nothing of this process's environment: a program might read it.
        env = {"LANG": "C.UTF-8", "PATH": os.defpath, "MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"}
        remedy = "its error output says why"
        self.has = json.loads(self.launch(command, START_TIMEOUT_S, "sandbox server", remedy, cwd="/", env=env))
        assert self.lines is not None
        return self.lines

    def close(self) -> None:
        """End the server and its program, and remove their files."""
        if self.lines is not None:
            self.lines.end(END_TIMEOUT_S)  # with the server its program dies: PR_SET_PDEATHSIG
            self.lines = None
            _remove_when_quiet(self.directory)


def _remove_when_quiet(directory: str) -> None:
    """Remove a directory in which a dying process may still write for a moment."""
    for _ in range(100):
        try:
            return remove_tree(directory)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
    shutil.rmtree(directory)


class SandboxPool(WorkerPool[Program, SandboxResult]):
    """`num_workers` servers, which start at once. `mechanisms`: the mechanisms of isolation that may be used.

    ValueError when this machine cannot give a guarantee that is not in `cfg.allow_weaker`.
    """

    def __init__(self, num_workers: int, cfg: SandboxConfig, mechanisms: Collection[str] = MECHANISMS) -> None:
        if sys.platform != "linux":
            raise ValueError("the sandbox needs Linux: run environments with programs on a Linux machine")
        sweep()
        self.directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
        os.chmod(self.directory, 0o711)
        # Held before it has its name: `sweep` of another process removes a directory whose lock is free.
        unnamed = os.path.join(self.directory, "unnamed_lock")
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(unnamed, os.path.join(self.directory, "lock"))
        self._servers = [_Server(os.path.join(self.directory, str(i)), cfg, mechanisms) for i in range(num_workers)]
        super().__init__(self._servers)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._check({Guarantee(name) for name in cfg.allow_weaker})
            for started in [self._threads.submit(server.start) for server in self._servers]:
                started.result()
            undo.pop_all()

    def _check(self, allow_weaker: set[Guarantee]) -> None:
        broken = self.probe()
        has = self._servers[0].has
        found = (
            f"Found here: seccomp {'yes' if has['seccomp'] else 'no'}, Landlock {has['landlock'] or 'no'}, namespaces "
            f"{'yes' if has['namespaces'] else 'no'}, programs run as user "
            f"{os.geteuid() if has['user'] is None else has['user']}."
        )
        missing = broken - allow_weaker
        if missing:
            needs = "; ".join(f"{guarantee}: {GUARANTEES[guarantee]}" for guarantee in sorted(missing))
            raise ValueError(
                f"programs cannot be isolated on this machine: {', '.join(sorted(missing))} cannot be guaranteed. "
                f"They need: {needs}. {found} Use such a kernel, allow the container these system calls, or, "
                f"if programs are trusted, set sandbox.allow_weaker: [{', '.join(sorted(missing))}]"
            )
        if broken:
            logger.warning("the sandbox does NOT guarantee: %s (sandbox.allow_weaker)", ", ".join(sorted(broken)))
        logger.info("the sandbox guarantees: %s. %s", ", ".join(sorted(set(Guarantee) - broken)), found)

    def probe(self) -> set[Guarantee]:
        """The guarantees that a program can break on this machine, found by a program that tries."""
        canary = Path(self.directory) / "canary"
        canary.write_text("nobody reads this")
        canary.chmod(0o666)
        result = self.run([Program(cells=[PROBE], stdin=f"{canary}\n")])[0]
        canary.unlink()
        if result.exit_status != 0:
            raise RuntimeError(f"the sandbox cannot run its own probe ({result.limit}): {result.stderr[-2000:]}")
        return {Guarantee(name) for name in json.loads(result.stdout)}

    def close(self) -> None:
        """End servers and programs, and remove their files."""
        super().close()
        os.close(self._lock)
        remove_tree(self.directory)


def sweep() -> None:
    """Remove the directories of killed pools of this user: their locks are free."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # being made, or being removed
            continue
        try:
            with suppress(BlockingIOError):  # its pool runs
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(str(directory))
        finally:
            os.close(lock)
