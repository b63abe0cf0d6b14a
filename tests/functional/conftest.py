"""No run outlives its test."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.functional.cli import RUNNING


@pytest.fixture(autouse=True)
def end_of_runs() -> Iterator[None]:
    """Kill the runs that a test has left, as one does that fails or reaches its limit."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
