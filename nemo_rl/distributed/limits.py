"""How much this machine gives this user, or this container, at once: processes and threads, cores, memory."""

import os
import resource
from collections.abc import Collection, Iterator
from pathlib import Path

PROC, CGROUPS, CPUS = Path("/proc"), Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")


def process_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[tuple[int, int, str]]:
    """(number allowed, number there is, how to raise it) of each limit. Linux counts a thread as a process."""
    found = []
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if allowed != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel does not hold root to it
        found.append((allowed, _num_threads(proc, os.geteuid()), "`ulimit -u`"))
    for limit, text in _limits("pids.max", proc, cgroups):
        used = int((limit.parent / "pids.current").read_text())
        found.append((int(text), used, f"{limit}, `--pids-limit` of Docker"))
    return found


def physical_cores(
    allowed: Collection[int] | None = None, *, cpus: Path = CPUS, proc: Path = PROC, cgroups: Path = CGROUPS
) -> int:
    """The cores that this process may use, at least 1: threads of one core count once, and a container's quota counts.

    Args:
        allowed: numbers of the processors that the process may use; None: as Linux says.
    """
    cores = set()
    for number in os.sched_getaffinity(0) if allowed is None else allowed:
        siblings = cpus / f"cpu{number}" / "topology" / "thread_siblings_list"  # virtual machines may not tell
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(number))
    quotas = [text.split() for _, text in _limits("cpu.max", proc, cgroups)]
    return max(1, min([len(cores), *(int(quota) // int(period) for quota, period in quotas)]))


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that new processes can have without swapping: of the machine, and of the container if that has a limit."""
    lines = (proc / "meminfo").read_text().splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, text in _limits("memory.max", proc, cgroups):
        statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
        used = int((limit.parent / "memory.current").read_text()) - int(statistics["inactive_file"])
        found.append(max(0, int(text) - used))
    return min(found)


def _limits(name: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, str]]:
    """The files `name` of this process's control group that set a limit, and their text (control groups 2)."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        limit = cgroups / line.removeprefix("0::/") / name
        if line.startswith("0::/") and limit.is_file() and not (text := limit.read_text().strip()).startswith("max"):
            yield limit, text


def _num_threads(proc: Path, user: int) -> int:
    number = 0
    for folder in proc.iterdir():
        try:
            if folder.name.isdecimal() and folder.stat().st_uid == user:
                number += len(os.listdir(folder / "task"))
        except OSError:  # it has ended
            continue
    return number
