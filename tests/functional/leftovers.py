"""Tests that never end, which test_leftovers.py ends. pytest finds them by the name of this file alone."""

import os
import subprocess
import time
from pathlib import Path

import pytest


def leave_a_process_in_a_session_of_its_own() -> None:
    command = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run(["python3", "-c", command], check=True)


def wait_for_the_end(name: str) -> None:
    Path(os.environ["LEFTOVERS"], name).touch()
    time.sleep(600)


def test_a_cluster() -> None:
    from nemo_rl.distributed.virtual_cluster import start_local_ray

    leave_a_process_in_a_session_of_its_own()
    start_local_ray(num_cpus=1, object_store_gb=0.1, forks_workers=True)
    wait_for_the_end("cluster")


def test_a_world() -> None:
    from tests.worlds import run_world

    run_world(lambda rank, world_size: wait_for_the_end(f"rank{rank}"), 2)


@pytest.mark.timeout(3)
def test_a_process() -> None:
    leave_a_process_in_a_session_of_its_own()
    wait_for_the_end("process")


def test_a_process_without_a_limit() -> None:
    leave_a_process_in_a_session_of_its_own()
    wait_for_the_end("process")
