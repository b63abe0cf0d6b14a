"""Which machines of a run train and which generate: the one place that divides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.models.generation.config import ColocatedConfig

KEY = "policy.generation.colocated"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """`training` and `generation` are the same machines where the two take turns on them."""

    training: ClusterConfig
    generation: ClusterConfig


def divide(cluster: ClusterConfig, colocated: ColocatedConfig) -> Machines:
    """The machines of each side. As long as `division_problems` has something to say, both sides see them all."""
    if colocated.enabled or any(division_problems(cluster, colocated)):
        return Machines(training=cluster, generation=cluster)
    unit = _unit(cluster)
    if cluster.num_nodes == 1:
        taken = colocated.resources.model_dump()[unit]
        parts = ({unit: cluster.workers_per_node - taken}, {unit: taken})
    else:
        taken = colocated.resources.num_nodes
        assert taken is not None
        parts = ({"num_nodes": cluster.num_nodes - taken}, {"num_nodes": taken})
    training, generation = (cluster.model_copy(update=part) for part in parts)
    return Machines(training=training, generation=generation)


def division_problems(cluster: ClusterConfig, colocated: ColocatedConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, what would work) where `colocated` does not say how to divide `cluster`."""
    resources = {key: value for key, value in colocated.resources.model_dump().items() if value is not None}
    if colocated.enabled:
        if resources:
            yield (
                f"{KEY}.resources",
                f"{', '.join(resources)} only count for generation on its own resources; leave them out, or set "
                f"{KEY}.enabled=false",
            )
        return
    unit, kind = _unit(cluster), kind_of_devices(cluster)
    other = ({"gpus_per_node", "cpu_workers_per_node"} - {unit}).pop()
    if other in resources:
        where = "has no GPUs" if unit == "cpu_workers_per_node" else "uses GPUs"
        yield f"{KEY}.resources.{other}", f"the cluster {where}; set {KEY}.resources.{unit} instead"
        return
    per_node = cluster.workers_per_node
    if cluster.num_nodes > 1:
        yield from _node_problems(cluster, resources, unit)
    elif resources.get("num_nodes", 1) != 1:
        yield (
            f"{KEY}.resources.num_nodes",
            f"{resources['num_nodes']} of one node (cluster.num_nodes=1) leaves none to train; leave it out, and say "
            f"with {KEY}.resources.{unit} how many of its {kind} generate",
        )
    elif per_node < 2:
        yield (
            f"{KEY}.enabled",
            f"the one of the {kind} of the one node cannot both train and generate on its own; set cluster.{unit}=2 or "
            f"more, or {KEY}.enabled=true",
        )
    elif unit not in resources:
        yield (
            f"{KEY}.resources.{unit}",
            f"is required: how many of the node's {per_node} {kind} generate, {_up_to(per_node)}",
        )
    elif resources[unit] >= per_node:
        yield (
            f"{KEY}.resources.{unit}",
            f"{resources[unit]} of the node's {per_node} {kind} leaves none to train; set {_up_to(per_node)}, or raise "
            f"cluster.{unit}",
        )


def kind_of_devices(cluster: ClusterConfig) -> str:
    """`GPUs` or `CPU workers`, for people."""
    return "GPUs" if cluster.use_gpus else "CPU workers"


def _node_problems(cluster: ClusterConfig, resources: dict[str, int], unit: str) -> Iterator[tuple[str, str]]:
    """Of several nodes, whole ones generate."""
    number, kind = cluster.num_nodes, kind_of_devices(cluster)
    if "num_nodes" not in resources:
        yield f"{KEY}.resources.num_nodes", f"is required: how many of the {number} nodes generate, {_up_to(number)}"
    elif resources["num_nodes"] >= number:
        yield (
            f"{KEY}.resources.num_nodes",
            f"{resources['num_nodes']} of {number} nodes leaves none to train; set {_up_to(number)}, or raise "
            "cluster.num_nodes",
        )
    if resources.get(unit, cluster.workers_per_node) != cluster.workers_per_node:
        yield (
            f"{KEY}.resources.{unit}",
            f"of several nodes whole ones generate, with all their {cluster.workers_per_node} {kind}; leave it out",
        )


def _unit(cluster: ClusterConfig) -> str:
    return "gpus_per_node" if cluster.use_gpus else "cpu_workers_per_node"


def _up_to(number: int) -> str:
    return "1" if number == 2 else f"1 to {number - 1}"
