"""The machines of a run, and who may use their devices when."""

from dataclasses import dataclass
from typing import Self

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.run import Command, Run
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.utils.config import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Bundles of machines, and the object that decides which worker group uses them."""

    machines: ClusterConfig
    cluster: RayVirtualCluster
    accelerator: Accelerator

    @classmethod
    def start(
        cls, command: Command, machines: ClusterConfig, groups_per_bundle: int, name: str, *, take_turns: bool
    ) -> Self:
        """The bundles of the run or of a part of it: one per GPU, or per CPU worker. They end with the command.

        `take_turns`: the worker groups on a GPU use it one after the other.
        """
        cluster = RayVirtualCluster(
            [machines.workers_per_node] * machines.num_nodes,
            use_gpus=machines.use_gpus,
            max_colocated_worker_groups=groups_per_bundle,
            num_gpus_per_node=machines.gpus_per_node,
            name=name,
            distinct_nodes=True,
        )
        accelerator = Accelerator(exclusive=take_turns and machines.use_gpus)
        return cls(machines=machines, cluster=command.stack.enter_context(cluster), accelerator=accelerator)


@dataclass(frozen=True, kw_only=True)
class RolloutDevices:
    """The devices of training, and of generation; both are one object if they take turns on the same devices."""

    training: Devices
    generation: Devices

    @classmethod
    def start(cls, run: Run[RolloutMasterConfig]) -> Self:
        """Book the bundles of training and, if it has resources of its own, of generation."""
        config, sampled, recorded = run.config, run.config.policy.generation, run.config.rollout.replay_from
        # On each bundle that generates: engine, rollout worker and, if it is enabled, the HTTP server.
        num_generating = 3 if sampled.engine.expose_http_server else 2
        # The worker that reads a record runs beside the policy, as colocated generation does.
        is_colocated = sampled.colocated.enabled or recorded is not None
        num_groups = 1 + num_generating * is_colocated + sum(not further.is_apart for further in config.further_models)
        training = Devices.start(run, config.training_cluster, num_groups, config.section, take_turns=True)
        if is_colocated:
            return cls(training=training, generation=training)
        generation = Devices.start(run, config.generation_cluster, num_generating, "generation", take_turns=False)
        generation.cluster.bundles()
        return cls(training=training, generation=generation)
