"""The workers that several files ask."""

from collections.abc import Iterator

import pytest

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import LIVE, RayWorkerBuilder, RayWorkerGroup

ECHO = RayWorkerBuilder("tests.unit.distributed.workers.EchoWorker", "hello")


@pytest.fixture(scope="package")
def echo_pair(ray_local: None) -> Iterator[RayWorkerGroup]:
    """Two workers for the tests that leave them whole."""
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, ECHO, name_prefix="echo", env_vars={"GIVEN": "yes"}) as group,
    ):
        yield group
    assert group not in LIVE
