"""A process that answers lines with lines, under a time limit. Standard library only: sandboxes start from it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import Any


class LineProcess:
    """A process and its two pipes, used by one thread at a time. `options` are those of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._poll = select.poll()
        self._poll.register(self.stdout, select.POLLIN)
        self._buffer = b""

    def send(self, line: bytes) -> None:
        """Send a line. BrokenPipeError when the process has ended."""
        self.stdin.write(line + b"\n")
        self.stdin.flush()

    def receive(self, timeout_s: float) -> bytes:
        """The next line. TimeoutError when there is none in time, EOFError when the process has ended."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self, grace_s: float = 0.0) -> None:
        """Close its input, and kill it if it has not ended by itself within `grace_s` seconds."""
        with contextlib.suppress(BrokenPipeError):  # of buffered bytes that it does not read any more
            self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.process.kill()
        self.process.wait()
        self.stdout.close()
