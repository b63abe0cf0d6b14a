"""A program in the sandbox: its limits, its result, and the code that runs it inside.

`run` is called in a forked interpreter that is already isolated. Standard library only.
"""

import ast
import atexit
import builtins
import contextlib
import errno
import gc
import json
import linecache
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Guarantee(StrEnum):
    """Guarantees of the sandbox for every program. `GUARANTEES` has the requirement of each one."""

    NETWORK = "network"  # no connection and no socket to anything outside the process
    WRITES = "writes"  # writes, removes and changes nothing outside the program's own directory
    READS = "reads"  # reads only files of Python and of the system's libraries
    PROCESSES = "processes"  # one process: it starts no other, and none outlives it
    SIGNALS = "signals"  # sends no signal to another process, and does not read its memory


_FILTER = "a seccomp filter (any kernel of the last ten years, also in containers)"
_FILES = "Landlock (Linux 5.13, also in containers), or user and mount namespaces"
GUARANTEES: dict[Guarantee, str] = {
    Guarantee.NETWORK: _FILTER,
    Guarantee.WRITES: _FILES,
    Guarantee.READS: _FILES,
    Guarantee.PROCESSES: _FILTER,
    Guarantee.SIGNALS: _FILTER,
}
"""Guarantee -> its requirement on the machine."""

MECHANISMS = ("namespaces", "seccomp", "landlock", "user")
"""Mechanisms that isolate programs; see `isolation.py`. `user`: root becomes another user."""


class LimitHit(StrEnum):
    """The limit that a program has reached. The last five are known from the error that ended it."""

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
class Program:
    """Python source to run. `__name__` is `"__main__"`, and `random` starts with the same seed every time.

    `check` runs in the program's own process: a malicious program can read it, or make it pass. Where that matters,
    compare the program's output with the expected one.
    """

    cells: list[str]  # run in order in one namespace; only the last one may print, echo and read stdin
    stdin: str = ""
    echo: bool = False  # print the value of the last cell when it ends with an expression, as the prompt of Python does
    check: str = ""  # source that runs in the same namespace after the cells


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The result of a program. `finished`: its cells and its check ran to their ends, without exit and exception. A
    malicious program can make it true."""

    stdout: str
    stderr: str
    exit_status: int  # negative: the signal that ended it
    limit: LimitHit | None
    finished: bool


SEED = 0
LIMIT_OF_ERRNO = {
    errno.EMFILE: LimitHit.OPEN_FILES,
    errno.EFBIG: LimitHit.FILE_SIZE,
    errno.EAGAIN: LimitHit.PROCESSES,
    errno.EPERM: LimitHit.FORBIDDEN,
    errno.EACCES: LimitHit.FORBIDDEN,
    errno.EROFS: LimitHit.FORBIDDEN,
    errno.EXDEV: LimitHit.FORBIDDEN,
    errno.ENOSPC: LimitHit.DISK,
}


def run(request: dict[str, Any], status_fd: int) -> None:
    """Run a request of the server and end the process. Standard input, output and error are already the program's."""
    os.environ.clear()
    os.environ.update({"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "PATH": "", "LANG": "C.UTF-8"})
    sys.argv = ["program.py"]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, mode, encoding="utf-8", errors="replace", closefd=False) for fd, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # pyrefly: ignore[bad-assignment]
    random.seed(SEED)
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    # The server runs without the module `site`.
    builtins.exit = builtins.quit = sys.exit  # pyrefly: ignore[bad-assignment]
    sys.modules["__main__"] = module
    gc.enable()
    exit_status = 1
    try:
        exit_status = _cells(request, vars(module), status_fd)
    finally:  # an exception is reported already; no code of the server may run in this process
        _leave(exit_status)


def _cells(request: dict[str, Any], namespace: dict[str, Any], status_fd: int) -> int:
    """Run the cells and the check, report how they ended, one JSON object per line, and return the exit status."""

    def report(**facts: object) -> None:
        os.write(status_fd, json.dumps({**facts, "token": request["token"]}).encode() + b"\n")

    *earlier, last = request["cells"]
    try:
        if earlier:
            with _silenced():
                for number, cell in enumerate(earlier, start=1):
                    _execute(cell, f"<cell {number}>", namespace, echo=False)
        name = f"<cell {len(earlier) + 1}>" if earlier else "<program>"
        _execute(last, name, namespace, echo=request["echo"])
        if request["check"]:
            _execute(request["check"], "<check>", namespace, echo=False)
        report(finished=True)
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as error:
        limit = LimitHit.MEMORY if isinstance(error, MemoryError) else None
        if isinstance(error, OSError):
            limit = LIMIT_OF_ERRNO.get(error.errno or 0)
        elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            limit = LimitHit.THREADS
        report(limit=limit)
        _show_traceback(error)
        raise
    return 0


@contextlib.contextmanager
def _silenced() -> Generator[None]:
    """Discards standard output and error, and empties standard input, in a `with` block."""
    kept = [os.dup(fd) for fd in range(3)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in enumerate(kept):
            os.dup2(copy, fd)
            os.close(copy)


def _execute(source: str, name: str, namespace: dict[str, Any], *, echo: bool) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if echo and isinstance(last, ast.Expr):
        tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    else:
        exec(compile(tree, name, "exec"), namespace)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _show_traceback(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # frames of this module
        trace = trace.tb_next
    shown = False
    try:
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace)
        shown = True
    finally:
        if not shown:  # no memory, no stderr, or a __str__ that raises
            os._exit(1)


def _leave(exit_status: int) -> None:
    """End as an interpreter does: wait for threads, run exit handlers, flush."""
    left = exit_status or 1  # an error below, e.g. of a closed output, is an exit status of 1
    try:
        vars(threading)["_shutdown"]()
        vars(atexit)["_run_exitfuncs"]()
        sys.stdout.flush()
        sys.stderr.flush()
        left = exit_status
    except SystemExit as leaving:
        left = _exit_status(leaving.code)
    finally:
        os._exit(left)
