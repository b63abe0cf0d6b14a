"""Verifications in processes of their own, each under a time limit: one that hangs is killed and replaced."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_LOGGED_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What to check: by which verifier (a name of `verification.VERIFIERS`), which text, against which truth."""

    verifier: str
    response: str
    ground_truth: str


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """`failure` is None, "timeout" (counts as not correct) or "died" (there is no verdict, see `died`).

    A verification "died" when it ended two processes: one by itself may have been ended from outside.
    """

    correct: bool
    answer: str | None = None
    failure: str | None = None


def died(job: Verification) -> str:
    """Why a verification has no verdict that ended its process twice."""
    return (
        f"verifier {job.verifier!r} ended its process twice, of memory or by a crash, at ground truth "
        f"{job.ground_truth[:MAX_LOGGED_CHARACTERS]!r}, response {job.response[-MAX_LOGGED_CHARACTERS:]!r}"
    )


class _Verifier:
    """One process, used by one thread at a time; started when it is first needed."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.selector: selectors.DefaultSelector | None = None
        self.buffer = b""

    def verify(self, job: Verification) -> VerificationResult:
        result = self._verify(job)
        if result is None:
            logger.warning("a verifier process was ended or stopped from outside, or by a response: once more")
            result = self._verify(job)
        if result is not None:
            return result
        self._log("ended its process twice, no verdict", job)
        return VerificationResult(correct=False, failure="died")

    def _verify(self, job: Verification) -> VerificationResult | None:
        """None when the process is gone, or is held by a signal."""
        if self.process is None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([job.verifier, job.response, job.ground_truth]).encode() + b"\n")
            self.process.stdin.flush()
            line = self._read_line(self.timeout_s)
        except (BrokenPipeError, EOFError):
            self.close()
            return None
        except TimeoutError:
            is_stopped = _is_stopped(self.process.pid)
            self.close()
            if is_stopped:
                return None
            self._log("took too long, counted as wrong", job)
            return VerificationResult(correct=False, failure="timeout")
        correct, answer = json.loads(line)
        return VerificationResult(correct=correct, answer=answer)

    def _log(self, what: str, job: Verification) -> None:
        logger.warning(
            "verification %s (limit %.1f s): ground truth %.200r, response %.200r",
            what,
            self.timeout_s,
            job.ground_truth,
            job.response[-MAX_LOGGED_CHARACTERS:],
        )

    def _start(self) -> None:
        command = [sys.executable, "-m", "nemo_rl.environments.math.verifier_process", str(self.timeout_s)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        try:
            self._read_line(START_TIMEOUT_S)
        except (EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(
                f"a verifier process did not start ({error!r}): run `{' '.join(command)}` to see why"
            ) from error

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
        if self.process is None:
            return
        assert self.selector is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.selector.close()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what was buffered for it has nowhere to go any more
            self.process.stdin.close()
        self.process = None


def _is_stopped(pid: int) -> bool:
    """Whether a signal holds the process, so that the time it took says nothing of its work."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


class VerifierPool:
    """`num_workers` verifier processes. Results in the order of the jobs."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self._verifiers = [_Verifier(timeout_s) for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="verifier")

    def verify(self, jobs: Sequence[Verification]) -> list[VerificationResult]:
        """All verdicts, after at most about (jobs / workers) * limit seconds if no process is ended from outside.

        Raises:
            RuntimeError: when verifier processes cannot be started.
        """
        results: list[VerificationResult | None] = [None] * len(jobs)
        numbers, lock = iter(range(len(jobs))), threading.Lock()

        def work(verifier: _Verifier) -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                results[number] = verifier.verify(jobs[number])

        running = [self._threads.submit(work, verifier) for verifier in self._verifiers[: len(jobs)]]
        for future in running:
            future.result()
        return [result for result in results if result is not None]

    def pids(self) -> list[int]:
        """Processes that run now."""
        return [verifier.process.pid for verifier in self._verifiers if verifier.process is not None]

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=True)
        for verifier in self._verifiers:
            verifier.close()
