"""What the machine and its container allow."""

from pathlib import Path

import pytest

from nemo_rl.distributed.limits import available_memory, physical_cores


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """Two cores of two threads, a processor of which nothing is told, and a container without a limit."""
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / "cpus" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    group = tmp_path / "cgroups" / "mine"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:cpu:/\n0::/mine\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroups"}


def test_threads_of_a_core_count_once_and_a_quota_counts(machine: dict[str, Path], tmp_path: Path) -> None:
    cpus = tmp_path / "cpus"
    found = [physical_cores(allowed, cpus=cpus, **machine) for allowed in ((0, 1, 2, 3), (0, 2), (0, 1), (0, 4, 5))]
    assert found == [2, 1, 2, 3]
    for quota, number in (("150000 100000", 1), ("50000 100000", 1), ("900000 100000", 2)):
        (machine["cgroups"] / "mine" / "cpu.max").write_text(f"{quota}\n")
        assert physical_cores((0, 1, 2, 3), cpus=cpus, **machine) == number


def test_the_memory_of_a_container_counts_without_the_files_that_can_be_dropped(machine: dict[str, Path]) -> None:
    assert available_memory(**machine) == 4000 * 1024
    group = machine["cgroups"] / "mine"
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    assert available_memory(**machine) == 500000
