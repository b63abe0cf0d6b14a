"""A cluster of this machine alone: out of reach of others, on no fixed port, its workers where the driver is."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.errors import RayLost
from nemo_rl.distributed.virtual_cluster import start_under_load
from tests.unit.distributed.test_worker_groups import eventually

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
FIXED_PORTS = (6379, 8265, 10001, 44217, 52365)  # of Ray, for clusters that others join

# Ray's process that prepares the environments of workers is slow: it waits for the end of the start.
SLOW_AGENT = """
import os, sys, time
while "--runtime-env-agent-port=" in str(sys.orig_argv) and not os.path.exists("{}"):
    time.sleep(0.01)
"""
LISTENERS = """
import json, os, pathlib, ray, signal, sys, time
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._private.node import Node
from ray._private.worker import global_worker
from nemo_rl.distributed.virtual_cluster import misfit, ray_loss, shutdown_ray, start_local_ray
from tests.functional.cli import assert_out_of_reach
starting, too_late = Node.start_ray_processes, [Exception("The node timed out.")]  # as on a busy machine
def start(node):
    if too_late: raise too_late.pop()
    starting(node)
Node.start_ray_processes = start
start_local_ray(num_cpus=2, object_store_gb=0.2)
assert not too_late
pathlib.Path("started").touch()
place = os.getcwd(), sys.executable, "here"
where = ray.remote(lambda: (os.getcwd(), sys.executable, os.environ["WORD"]))
found = ray.get(where.options(runtime_env={"env_vars": {"WORD": "here"}}).remote())
assert found == place, "Ray started a copy of the project"
assert_out_of_reach(os.getsid(0))
address = ray.get_runtime_context().gcs_address
assert "the cluster of one other run" in misfit(address)
other = json.dumps({"ray_version": "2.9.0", "python_version": "3.9.7"}).encode()
global_worker.gcs_client.internal_kv_put(CLUSTER_METADATA_KEY, other, True, namespace=b"cluster")
here = f"this process Ray {ray.__version__} with Python {sys.version.split()[0]}"
assert misfit(address) == f"it has Ray 2.9.0 with Python 3.9.7, and {here}"
os.environ["RAY_AUTH_TOKEN"] = 64 * "0"
ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
assert "this process does not have its token" in misfit(address)
del os.environ["RAY_AUTH_TOKEN"]
ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
assert ray_loss() is None
[raylet] = global_worker.node.all_processes["raylet"]
os.kill(raylet.process.pid, signal.SIGSTOP)
while (said := ray_loss()) is None:
    time.sleep(0.01)
assert "is stopped (SIGSTOP" in said, said
began = time.monotonic()
shutdown_ray()  # `ray.shutdown` never returns here
assert time.monotonic() - began < 30
"""

FORKS = """
import json, os, sys
from nemo_rl.distributed.virtual_cluster import init_ray, start_local_ray
for number, (function, variables) in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        os.environ |= variables
        os.dup2(os.open(str(number), os.O_CREAT | os.O_WRONLY), 2)
        {"init_ray": init_ray, "start_local_ray": start_local_ray}[function]()
        os._exit(0)
    os.wait()
"""
TOKEN = "^ValueError: Ray's token cannot be read: .*{}.* Set RAY_AUTH_TOKEN_PATH"
UNUSABLE = [
    ("init_ray", {"RAY_ADDRESS": "[::1]:9"}, r"ValueError: .*at \[::1\]:9: it does not answer \(\[Errno 1?\d\d\]"),
    ("start_local_ray", {"RAY_AUTH_TOKEN_PATH": "empty"}, TOKEN.format("empty")),
    ("start_local_ray", {"RAY_AUTH_TOKEN_PATH": "missing"}, TOKEN.format("missing")),
]

KILLED = """
import os, signal, subprocess, time
from ray._private.worker import global_worker
from nemo_rl.distributed.virtual_cluster import start_local_ray
start_local_ray(num_cpus=2, object_store_gb=0.2)
time.sleep(3)  # Ray's agents end by themselves as long as they start
[raylet] = global_worker.node.all_processes["raylet"]
subprocess.run(["pgrep", "--parent", str(raylet.process.pid)], check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_driver_that_is_killed_leaves_no_process_of_ray():
    done = subprocess.run([sys.executable, "-c", KILLED], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    agents = [Path("/proc", pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(agents) >= 2
    # The agents themselves give up after a minute.
    assert eventually(lambda: not any(agent.exists() for agent in agents), limit_s=40)


SHARES = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
block, lock = SharedMemory(create=True, size=4096), multiprocessing.get_context("spawn").Lock()
print("/dev/shm/" + block.name, "/dev/shm/" + lock._semlock.name.strip("/"), flush=True)
time.sleep(600)
"""
HAS_CHILDREN = """
import os, signal, subprocess, sys
from nemo_rl.utils import guards
guards.{guard}()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("guard", ["end_group_after_me", "end_children_after_me"])
def test_children_of_a_process_that_is_killed_leave_no_shared_memory_and_no_semaphore(guard):
    """Python's own process that would remove them is killed with them."""
    command = [sys.executable, "-c", HAS_CHILDREN.format(guard=guard), SHARES]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    paths = [Path(path) for path in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(paths) == 2
    assert eventually(lambda: not any(path.exists() for path in paths))


class BusyMachine:
    """A machine on which a start of Ray fails so often, takes so many seconds, and an import of Ray so many."""

    def __init__(self, failures: int, start_s: float, import_s: float) -> None:
        self.failures, self.start_s, self.import_s = failures, start_s, import_s
        self.now, self.starts = 0.0, 0

    def start(self) -> None:
        self.starts += 1
        self.now += self.start_s
        if self.starts <= self.failures:
            raise Exception("The current node timed out during startup.")

    def measure_import(self) -> float:
        self.now += self.import_s
        return self.import_s

    def play(self) -> int:
        start_under_load(self.start, measure_import=self.measure_import, clock=lambda: self.now)
        return self.starts


def test_ray_is_started_up_to_four_times_in_a_limit_that_grows_with_the_time_of_an_import(caplog):
    assert BusyMachine(0, 5, 1).play() == 1
    assert BusyMachine(3, 30, 5).play() == 4
    assert ["(try 1)" in caplog.text, caplog.text.count("is started again")] == [True, 3]
    with pytest.raises(RayLost, match=r"in 4 tries and \d+ s: The current node .* `import ray` takes 5.0 s here now"):
        BusyMachine(9, 30, 5).play()
    idle = BusyMachine(9, 46, 1)  # 60 s and 30 imports of 1 s
    with pytest.raises(RayLost, match=r"in 2 tries and 94 s: .* takes 1.0 s"):
        idle.play()

    def wrong() -> None:
        raise ValueError("a mistake of the user")

    with pytest.raises(ValueError, match="a mistake"):
        start_under_load(wrong, measure_import=lambda: 0.0)


def test_workers_start_when_ray_has_noticed_that_a_node_is_lost(caplog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(virtual_cluster, "_started_here", False)  # the cluster of other tests may run in this process
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.create_server(("127.0.0.1", 0)) as lost:
        ports = [server.getsockname()[1] for server in (raylet, lost)]
        lost.close()
        looks = iter([True, True, False])  # whether Ray believes that the second one is alive

        def nodes() -> list[dict[str, Any]]:
            alive = (True, next(looks))
            named = zip(ports, alive, strict=True)
            return [{"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": n, "Alive": a} for n, a in named]

        virtual_cluster.await_lost_nodes(nodes)
    assert next(looks, None) is None, "it has asked until the node was not alive"
    assert "Ray is about to notice that 127.0.0.1 is lost" in caplog.text


def test_an_address_or_file_that_ray_cannot_use_is_named_in_the_last_line_with_the_way_in(tmp_path: Path):
    """In processes of their own: a cluster of other tests may run in this one."""
    (tmp_path / "empty").touch()
    orders = json.dumps([case[:2] for case in UNUSABLE])
    how: Any = {"env": ENVIRONMENT | {"RAY_AUTH_MODE": "token"}, "cwd": tmp_path}  # Ray reads it when imported
    subprocess.run([sys.executable, "-c", FORKS], input=orders, text=True, timeout=800, check=True, **how)
    for number, (_, _, line) in enumerate(UNUSABLE):
        said = (tmp_path / str(number)).read_text()
        assert re.search(line, said.splitlines()[-1]), said


def test_every_port_is_on_loopback_and_none_is_fixed_and_uv_run_starts_no_worker(tmp_path: Path):
    """To Ray, an ancestor of the driver looks like `uv run`, and Ray would start each worker with it.

    TMPDIR is longer than the path of a socket may be. In the end Ray's own process is stopped.
    """
    launcher = tmp_path / "uv"
    launcher.symlink_to("/bin/sh")
    (tmp_path / "run").write_text(f'"{sys.executable}" listeners.py; exit $?')
    (tmp_path / "listeners.py").write_text(LISTENERS)
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT.format(tmp_path / "started"))
    temporary = tmp_path / (100 * "l")
    temporary.mkdir()
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(temporary)}
    how: Any = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 280, "start_new_session": True}
    with ExitStack() as taken:
        for port in FIXED_PORTS:
            with suppress(OSError):  # taken already: as good
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        done = subprocess.run([str(launcher), "run"], env=environment, **how)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("is_terminal", "colours"), [(True, None), (False, "0")], ids=["terminal", "file"])
def test_lines_of_workers_have_colours_only_on_a_terminal(is_terminal: bool, colours: str | None) -> None:
    program = (
        "import os, sys; sys.stdout.isatty = sys.stderr.isatty = lambda: sys.argv[1] == 'True'\n"
        "from nemo_rl.distributed.virtual_cluster import _prepare; _prepare()\n"
        "print(os.environ.get('RAY_COLOR_PREFIX'))"
    )
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_COLOR_PREFIX"}
    command = [sys.executable, "-c", program, str(is_terminal)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(colours)
