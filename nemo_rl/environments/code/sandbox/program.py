"""The inside of the sandbox: runs a program in an interpreter that is already there, and says how it ended."""

from __future__ import annotations

import ast
import atexit
import builtins
import errno
import gc
import io
import json
import linecache
import os
import random
import sys
import threading
import traceback
import types
from typing import Any

from nemo_rl.environments.code.sandbox.limits import LimitHit

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
    """Run it to its end and leave the process. Standard input, output and error are already those of the program."""
    os.environ.clear()
    os.environ.update({"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "PATH": "", "LANG": "C.UTF-8"})
    sys.argv = ["program.py"]
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(buffer, "utf-8", "replace")
        for buffer in (
            io.BufferedReader(io.FileIO(0, "r", closefd=False)),
            io.BufferedWriter(io.FileIO(1, "w", closefd=False)),
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
        )
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed(SEED)
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    gc.enable()
    status = _Status(status_fd, request["token"])
    exit_status = 1
    try:
        exit_status = _cells(request, vars(module), status)
    finally:  # it has raised, and that is told; nothing of the server may run in this process
        _leave(exit_status)


class _Status:
    """What the runner has to say to the server, one JSON object per line."""

    def __init__(self, fd: int, token: str) -> None:
        self.fd = fd
        self.token = token

    def tell(self, **facts: object) -> None:
        os.write(self.fd, json.dumps({**facts, "token": self.token}).encode() + b"\n")


def _cells(request: dict[str, Any], namespace: dict[str, Any], status: _Status) -> int:
    """Exit status, after whatever the program does."""
    cells, number = request["cells"], 0
    try:
        if len(cells) > 1:
            with _Hushed():
                for number, cell in enumerate(cells[:-1]):
                    _execute(cell, f"<cell {number + 1}>", namespace, echo=False)
        number = len(cells) - 1
        name = f"<cell {number + 1}>" if number else "<program>"
        _execute(cells[-1], name, namespace, echo=request["echo"])
        if request["check"]:
            number += 1
            _execute(request["check"], "<check>", namespace, echo=False)
        status.tell(finished=True)
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as error:
        limit = LimitHit.MEMORY if isinstance(error, MemoryError) else None
        if isinstance(error, OSError):
            limit = LIMIT_OF_ERRNO.get(error.errno or 0)
        elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            limit = LimitHit.THREADS
        status.tell(error=type(error).__name__, limit=limit, failed_cell=number)
        _show_traceback(error)
        raise
    return 0


class _Hushed:
    """Standard output and error go nowhere, and standard input is empty, in a `with` block."""

    def __enter__(self) -> None:
        self.kept = [os.dup(fd) for fd in range(3)]
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, kept in enumerate(self.kept):
            os.dup2(kept, fd)
            os.close(kept)


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
    """What an interpreter does at its end: waits for threads, runs exit handlers, flushes, and is gone."""
    left = exit_status or 1  # unless all of it works: the program may have closed its output
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
