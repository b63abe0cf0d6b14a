"""The workers that several files ask."""

from collections.abc import Iterator

import pytest

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LIVE, RayWorkerBuilder, RayWorkerGroup

ECHO = RayWorkerBuilder("tests.unit.distributed.workers.EchoWorker", "hello")


@pytest.fixture(scope="package")
def echo_cluster(ray_local: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2, name="echo") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def echo_pair(echo_cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    """Two workers for the tests that leave them whole."""
    env_vars = {"GIVEN": "yes", "OMP_NUM_THREADS": "1", "QUOTED": """it's ${GIVEN} "$5"${NOT_GIVEN};"""}
    with RayWorkerGroup(echo_cluster, ECHO, name_prefix="echo", env_vars=env_vars) as group:
        yield group
    assert group not in LIVE
