"""How many processes and threads this user, or this container, may have at once."""

import os
import resource
from pathlib import Path


def process_limits(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int, str]]:
    """(number allowed, number there is, how to raise it) of each limit. Linux counts a thread as a process."""
    found = []
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if allowed != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel does not hold root to it
        found.append((allowed, _num_threads(proc, os.geteuid()), "`ulimit -u`"))
    for line in (proc / "self/cgroup").read_text().splitlines():
        group = cgroups / line.removeprefix("0::/")
        limit = group / "pids.max"
        if line.startswith("0::/") and limit.is_file() and (text := limit.read_text().strip()) != "max":
            found.append((int(text), int((group / "pids.current").read_text()), f"{limit}, `--pids-limit` of Docker"))
    return found


def _num_threads(proc: Path, user: int) -> int:
    number = 0
    for folder in proc.iterdir():
        try:
            if folder.name.isdecimal() and folder.stat().st_uid == user:
                number += len(os.listdir(folder / "task"))
        except OSError:  # it has ended
            continue
    return number
