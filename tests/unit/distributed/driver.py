"""A driver that prints the processes it has started and then waits for them for ever."""

import json
import signal
import sys

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests with `&` ignores SIGINT
    init_ray(log_dir=sys.argv[1])
    builder = RayWorkerBuilder("tests.unit.distributed.workers.EchoWorker")
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, builder, name_prefix="echo") as group,
    ):
        print(json.dumps(group.call_all("pid") + group.call_all("start_child")), flush=True)
        group.call_all("sleep", 600)


if __name__ == "__main__":
    main()
