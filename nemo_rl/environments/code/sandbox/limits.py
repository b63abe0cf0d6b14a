"""What a program in the sandbox may use, what it asked for, and what came of it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Guarantee(StrEnum):
    """What the sandbox promises of every program. See `GUARANTEES` for what each one rests on."""

    NETWORK = "network"  # no connection and no socket to anything outside the process
    WRITES = "writes"  # nothing is written, removed or changed outside the program's own directory
    READS = "reads"  # no file is read but those of Python and the system's libraries
    PROCESSES = "processes"  # one process: it starts no other, and none outlives it
    SIGNALS = "signals"  # no signal to another process, and no look into one


GUARANTEES: dict[Guarantee, str] = {
    Guarantee.NETWORK: "a seccomp filter (any kernel of the last ten years, also in containers)",
    Guarantee.WRITES: "Landlock (Linux 5.13, also in containers), or user and mount namespaces",
    Guarantee.READS: "Landlock (Linux 5.13, also in containers), or user and mount namespaces",
    Guarantee.PROCESSES: "a seccomp filter (any kernel of the last ten years, also in containers)",
    Guarantee.SIGNALS: "a seccomp filter (any kernel of the last ten years, also in containers)",
}
"""What has to be there for each guarantee."""


MECHANISMS = ("namespaces", "seccomp", "landlock", "user")
"""What isolates programs; see `sandbox_namespaces` and `sandbox_isolation`. `user`: root becomes somebody else."""


class LimitHit(StrEnum):
    """Why a program did not get what it wanted. The last five are known from the error that ended it."""

    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    OUTPUT = "output"
    MEMORY = "memory"
    THREADS = "threads"
    DISK = "disk"  # all its files together, or their number
    FILE_SIZE = "file_size"
    OPEN_FILES = "open_files"
    PROCESSES = "processes"
    FORBIDDEN = "forbidden"  # a file, socket, signal or system call that is not its own


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program; the one process that it is may have threads."""

    wall_s: float = 10.0
    cpu_s: int = 5  # whole seconds, of all its threads
    memory_bytes: int = 1 << 29  # address space; the interpreter itself takes some 40 MiB of it
    output_bytes: int = 1 << 16  # of stdout and stderr together
    threads: int = 32
    open_files: int = 64
    file_bytes: int = 1 << 24
    disk_bytes: int = 1 << 26  # of all files
    files: int = 1000


@dataclass(frozen=True, kw_only=True)
class Program:
    """Python source to run. `__name__` is `"__main__"`, and `random` starts with the same seed every time.

    `check` runs in the program's own process: a program that sets out to can read it, or make it pass. Where that
    matters, compare what the program prints with what is expected.
    """

    cells: list[str]  # one after another in one namespace; only the last one may print, echo and read stdin
    stdin: str = ""
    echo: bool = False  # print the value of the last cell when it ends with an expression, as the prompt of Python does
    check: str = ""  # source that is run in the same namespace once the cells have finished


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What a program did. `finished`: its cells and its check ran to their ends, without exit and exception; a program
    that sets out to can have it said of one that did not."""

    stdout: str
    stderr: str
    exit_status: int  # negative: the signal that ended it
    limit: LimitHit | None
    finished: bool
    duration_s: float
    error: str = ""  # type of the exception that ended it
    failed_cell: int | None = field(default=None)  # which cell raised; None: none did
