"""Workers that a template forks are those that Ray would have started, and others start as before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from tests.processes import one_at_a_time
from tests.unit.distributed.conftest import ECHO
from tests.unit.distributed.workers import EchoWorker

ROOT = Path(__file__).parents[3]


def describe(names: list[str]) -> dict[str, Any]:
    """Of a worker process: its variables, its parent, its group, and what it has."""
    return {
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " "),
        "leads": os.getpgrp() == os.getpid(),
        "folder": os.getcwd(),
        "paths": sys.path,
        "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "draws": __import__("numpy").random.random(),
    }


def groups(cluster: RayVirtualCluster, **env_vars: str) -> list[dict[str, Any]]:
    with RayWorkerGroup(cluster, ECHO, num_workers=2, env_vars=env_vars) as group:
        return group.call_all(EchoWorker.apply, describe, ["RANK", "MINE", "OMP_NUM_THREADS", "FAR"])


@pytest.fixture
def cluster(ray_local: None):
    with RayVirtualCluster([2], use_gpus=False, name="template") as cluster:
        yield cluster


def test_a_forked_worker_has_its_own_variables_paths_group_and_random_numbers(cluster, tmp_path: Path):
    found = groups(cluster, MINE="${HOME}", PYTHONPATH=str(tmp_path))
    for rank, worker in enumerate(found):
        assert "worker_template" in worker["parent"] and worker["leads"] and worker["children"]
        assert worker["environment"] == {"RANK": str(rank), "MINE": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
        packages = next(path for path in worker["paths"] if path.endswith("site-packages"))
        assert worker["folder"] == os.getcwd()
        assert worker["paths"].index(str(tmp_path)) < worker["paths"].index(packages)
    assert found[0]["draws"] != found[1]["draws"]


def test_a_worker_whose_libraries_load_in_another_way_is_a_python_of_its_own(cluster):
    for worker in groups(cluster, OMP_NUM_THREADS="3"):
        assert "worker_template" not in worker["parent"] and worker["environment"]["OMP_NUM_THREADS"] == "3"


ENDS = """
import os, ray
from nemo_rl.distributed import virtual_cluster
virtual_cluster.start_local_ray(num_cpus=2, object_store_gb=0.1, forks_workers=True)
class Worker:
    def pids(self):
        return os.getpid(), os.getppid()
first = ray.remote(Worker).remote()
pid, template = ray.get(first.pids.remote())
assert template == virtual_cluster._template._process.pid
os.kill(template, 9)
second = ray.remote(Worker).remote()
assert ray.get(second.pids.remote())[1] != template, "the template was killed"
assert ray.get(first.pids.remote())[0] == pid, "a worker outlives it"
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_outlive_a_killed_template_and_end_with_the_driver():
    odd = {**os.environ, "HF_ODD": """it's "5" \\n {template}"""}  # Ray's program for a worker holds it
    with one_at_a_time("start"):
        done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, env=odd, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    ended = time.monotonic()
    while Path("/proc", done.stdout.strip()).exists():
        assert time.monotonic() < ended + 10
        time.sleep(0.1)
