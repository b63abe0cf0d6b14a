"""Processes that answer lines with lines under a time limit, and pools of them. Standard library only."""

import contextlib
import os
import queue
import select
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class LineProcess:
    """A process and its two pipes, used by one thread at a time. `subprocess.Popen` gets `options`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
        )
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


class LineWorker[JobT, ResultT](ABC):
    """Runs jobs in a process of its own, which it starts when it needs it and replaces when it ends."""

    lines: LineProcess | None = None

    @abstractmethod
    def run(self, job: JobT, /) -> ResultT:
        """Run one job; called by one thread at a time."""

    def run_all(self, jobs: deque[tuple[int, JobT]]) -> Iterator[tuple[int, ResultT]]:
        """Run numbered jobs until none is left, and yield their results. Other workers take from the same `jobs`."""
        while (taken := next_job(jobs)) is not None:
            number, job = taken
            yield number, self.run(job)

    def launch(self, command: Sequence[str], timeout_s: float, name: str, remedy: str, **options: Any) -> bytes:
        """Start the process and return its first line. RuntimeError with `remedy` when there is none in time."""
        self.lines = LineProcess(command, **options)
        try:
            return self.lines.receive(timeout_s)
        except (EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(f"a {name} did not start ({error!r}): {remedy}") from error

    def close(self) -> None:
        """End the process."""
        if self.lines is not None:
            self.lines.end()
            self.lines = None


def next_job[JobT](jobs: deque[tuple[int, JobT]]) -> tuple[int, JobT] | None:
    """Take the first of the jobs; None when there is none. Threads may call it at the same time."""
    try:
        return jobs.popleft()
    except IndexError:
        return None


class WorkerPool[JobT, ResultT]:
    """Runs jobs in parallel on workers. May be called from several threads."""

    def __init__(self, workers: Sequence[LineWorker[JobT, ResultT]]) -> None:
        self.workers = workers
        self._idle: queue.LifoQueue[LineWorker[JobT, ResultT]] = queue.LifoQueue()  # the last one runs already
        for worker in reversed(workers):
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max_workers=len(workers), thread_name_prefix="workers")

    def run(self, jobs: Sequence[JobT]) -> list[ResultT]:
        """The results in the order of the jobs. RuntimeError when processes cannot be started."""
        waiting, results = deque(enumerate(jobs)), dict[int, ResultT]()
        num_threads = min(len(self.workers), len(jobs))
        for running in [self._threads.submit(self._work, waiting, results) for _ in range(num_threads)]:
            running.result()
        return [results[number] for number in range(len(jobs))]

    def _work(self, waiting: deque[tuple[int, JobT]], results: dict[int, ResultT]) -> None:
        worker = self._idle.get()
        try:
            for number, result in worker.run_all(waiting):
                results[number] = result
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            worker.close()
