"""An engine whose ranks are on two nodes of Ray: together with the policy and apart, over tensors and over stages.

Each node has process numbers, shared memory and a folder of Ray of its own, as a machine has, and they share this
machine's network.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.functional.cli import BARE, SMALL, end, exact, free_port, run_until
from tests.functional.faulty import engine_processes

OWN = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
OWN_FOLDERS = "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {folder} && "
RAY = "exec {python} -m ray.scripts.scripts start --block --disable-usage-stats {role}"


def may_unshare() -> bool:
    return os.geteuid() == 0 and subprocess.run([*OWN, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not may_unshare(), reason="a node of its own needs root's right to make namespaces"),
]


class Nodes:
    """A cluster of Ray whose nodes are added and killed by number."""

    def __init__(self, logs: Path) -> None:
        self.address, self._logs = f"127.0.0.1:{free_port()}", logs
        self.environment = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
        self._folder = Path(tempfile.mkdtemp(prefix="ray_nodes_", dir="/tmp"))  # short, for the paths of sockets
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    def add(self, number: int, num_cpus: int) -> None:
        """Returns when the node has joined. Node 0 is the head, whose processes a driver beside it sees."""
        role = f"--address={self.address}"
        if number == 0:
            port = self.address.rpartition(":")[2]
            role = f"--head --port={port} --include-dashboard=false --temp-dir={self._folder}"
        role += f" --num-cpus={num_cpus} --object-store-memory=200000000"
        inside = (OWN_FOLDERS if number else "") + RAY
        command = ["sh", "-c", inside.format(python=sys.executable, role=role, folder=self._folder)]
        deadline = time.monotonic() + 600
        while not self._has_joined(number, [*(OWN if number else ()), *command], deadline):
            assert time.monotonic() < deadline, "a busy machine does not start a node in the 30 s that Ray gives it"

    def _has_joined(self, number: int, command: list[str], deadline: float) -> bool:
        """Start a node, and wait for it. False if Ray itself found its start too slow."""
        environment = {name: value for name, value in (os.environ | self.environment).items() if name != "RAY_ADDRESS"}
        log = self._logs / f"node-{number}.log"
        with log.open("wb") as file:
            started = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        self._nodes[number] = started
        while "Ray runtime started" not in log.read_text():
            if started.poll() is not None and "timed out during startup" in log.read_text():
                return False
            assert started.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        return True

    def with_engine(self) -> int:
        """The last node on which a rank of an engine computes."""
        return max(number for number, node in self._nodes.items() if engine_processes(node.pid))

    def kill(self, number: int) -> None:
        """As a machine that loses its power: every process of the node ends at once."""
        process = self._nodes.pop(number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for number in sorted(self._nodes, reverse=True):
            self.kill(number)
        shutil.rmtree(self._folder)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        made.add(0, num_cpus=0)
        yield made
    finally:
        made.close()


TOGETHER = ("cluster.num_nodes=2", "cluster.cpu_workers_per_node=1")
APART = (
    "cluster.num_nodes=3",
    "cluster.cpu_workers_per_node=1",
    "policy.generation.colocated={enabled: false, resources: {num_nodes: 2}}",
)
SAVES = ("checkpointing.enabled=true", "checkpointing.metric_name=null")


@pytest.mark.parametrize("over", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("where", [TOGETHER, APART], ids=["together", "apart"])
def test_an_engine_on_two_nodes_one_of_which_is_killed(
    tmp_path: Path, nodes: Nodes, where: tuple[str, ...], over: str
) -> None:
    """The killed node takes a rank of the engine with it, and where it is the policy's too, one of the policy."""
    num_nodes = int(where[0].partition("=")[2])
    for number in range(1, num_nodes + 1):
        nodes.add(number, num_cpus=4)
    overrides = (*SMALL, *BARE, *SAVES, *where, f"policy.generation.vllm_cfg.{over}=2", "grpo.max_num_steps=8")
    process = run_until(tmp_path, "step 3/8", *overrides, timeout_s=600, **nodes.environment)
    nodes.kill(nodes.with_engine())
    nodes.add(num_nodes + 1, num_cpus=4)
    done = end(process, tmp_path, timeout_s=800)
    newest = {row["step"]: row for row in done.steps}  # a step is taken again after the policy's last checkpoint
    exact([newest[step] for step in sorted(newest)], 8)
    assert "restarting generation-0" in done.output
    assert f"refit over packed_{'shm' if where is TOGETHER else 'collective'}" in done.output
