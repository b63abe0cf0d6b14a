"""What tests do at the same time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Only one process of this test run is inside: on two cores, starts of Ray that share them may take too long."""
    with Path(os.environ["RAY_TMPDIR"], f"{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
