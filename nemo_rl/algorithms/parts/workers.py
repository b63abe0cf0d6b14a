"""The number of CPU workers that fit into the memory of this machine."""

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.config.supervised import SupervisedMasterConfig
from nemo_rl.distributed.limits import available_memory
from nemo_rl.evals.config import EvalMasterConfig


def fit_workers[ConfigT: RolloutMasterConfig | SupervisedMasterConfig | EvalMasterConfig](
    config: ConfigT, *, available: int | None = None
) -> ConfigT:
    """`config` with fewer CPU workers, if their number was chosen and the memory of so many is not available.

    A model that is not on this machine limits nothing, nor does a cluster of several nodes.

    Args:
        available: bytes; None: those of this machine.
    """
    while config.cluster.reason is not None and config.cluster.workers_per_node > 1:
        from nemo_rl.algorithms.parts.placement import memory_of_cpu_run  # torch: only where a prediction decides
        from nemo_rl.models.policy.memory import gigabytes

        number, needed = config.cluster.workers_per_node, memory_of_cpu_run(config)
        free = available_memory() if available is None else available
        if needed is None or needed <= free:
            break
        limit = f"with {number}, the run needs {gigabytes(needed)} of memory, and {gigabytes(free)} are available"
        fewer = config.with_at_most(number - 1, limit)
        if any(fewer.problems()):
            break
        config = fewer
    return config
