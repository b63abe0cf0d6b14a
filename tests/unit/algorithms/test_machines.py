"""Which machines train and which generate."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from tests.tables import cases, said_once
from tests.unit.config.run_configs import build, problems_of

APART = "policy.generation.colocated.enabled=false"
RESOURCES = "policy.generation.colocated.resources"
CPU = "cluster.gpus_per_node=0"


def ranks(config: GRPOMasterConfig) -> tuple[int, int]:
    return config.training_cluster.num_workers, config.generation_cluster.num_workers


def test_colocated_sides_share_all_machines() -> None:
    assert ranks(build("cluster.gpus_per_node=4", "cluster.num_nodes=2")) == (8, 8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("cluster.gpus_per_node=8", f"{RESOURCES}.gpus_per_node=6", "policy.train_micro_batch_size=4"), (2, 6)),
        ((CPU, "cluster.cpu_workers_per_node=3", f"{RESOURCES}.cpu_workers_per_node=1"), (2, 1)),
        (("cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{RESOURCES}.num_nodes=2"), (16, 16)),
        (("cluster.gpus_per_node=2", "cluster.num_nodes=5", f"{RESOURCES}={{num_nodes: 1, gpus_per_node: 2}}"), (8, 2)),
        ((CPU, "cluster.cpu_workers_per_node=2", "cluster.num_nodes=2", f"{RESOURCES}.num_nodes=1"), (2, 2)),
    ],
)
def test_one_node_is_divided_and_several_are_shared_out_whole(
    overrides: tuple[str, ...], expected: tuple[int, int]
) -> None:
    config = build(APART, *overrides, "cluster.worker_timeout_s=77")
    assert ranks(config) == expected
    assert config.training_cluster.worker_timeout_s == config.generation_cluster.worker_timeout_s == 77


REFUSED = """
policy.generation.colocated.resources.num_nodes=1
    -> policy.generation.colocated.resources ... num_nodes only count for generation on its own resources; leave
policy.generation.colocated.enabled=false & cluster.gpus_per_node=8
    -> policy.generation.colocated.resources.gpus_per_node ... is required: how many of the node's 8 GPUs ge
policy.generation.colocated.enabled=false & cluster.gpus_per_node=1
    -> policy.generation.colocated.enabled ... cannot both train and generate on its own; set cluster.gpus
policy.generation.colocated.enabled=false & cluster.gpus_per_node=8
    & policy.generation.colocated.resources.gpus_per_node=8
    -> policy.generation.colocated.resources.gpus_per_node
       ... 8 of the node's 8 GPUs leaves none to train; set 1 to 7, or raise cluster.gpus_per_node
policy.generation.colocated.enabled=false & cluster.gpus_per_node=0 & cluster.cpu_workers_per_node=2
    & policy.generation.colocated.resources.gpus_per_node=1
    -> policy.generation.colocated.resources.gpus_per_node
       ... the cluster has no GPUs; set policy.generation.colocated.resources.cpu_workers_per_node instead
policy.generation.colocated.enabled=false & cluster.gpus_per_node=2
    & policy.generation.colocated.resources.cpu_workers_per_node=1
    -> policy.generation.colocated.resources.cpu_workers_per_node
       ... the cluster uses GPUs; set policy.generation.colocated.resources.gpus_per_node instead
policy.generation.colocated.enabled=false & cluster.gpus_per_node=2
    & policy.generation.colocated.resources={gpus_per_node: 1, num_nodes: 2}
    -> policy.generation.colocated.resources.num_nodes
       ... 2 of one node (cluster.num_nodes=1) leaves none to train; leave it out
policy.generation.colocated.enabled=false & cluster.num_nodes=4
    -> policy.generation.colocated.resources.num_nodes ... is required: how many of the 4 nodes generate, 1 to 3
policy.generation.colocated.enabled=false & cluster.num_nodes=2 & policy.generation.colocated.resources.num_nodes=2
    -> policy.generation.colocated.resources.num_nodes
       ... 2 of the 2 nodes leaves none to train; set 1, or raise cluster.num_nodes
policy.generation.colocated.enabled=false & cluster.num_nodes=2 & cluster.gpus_per_node=8
    & policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 4}
    -> policy.generation.colocated.resources.gpus_per_node
       ... whole ones generate, with all their 8 GPUs; leave it out
"""


@pytest.mark.parametrize(("overrides", "said"), cases(REFUSED))
def test_a_division_that_cannot_be_is_refused_with_what_would_work(overrides: tuple[str, ...], said: str) -> None:
    said_once(said, problems_of(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("policy.train_global_batch_size=64", "policy.train_micro_batch_size=1"),
            "64 cannot be shared by 5 training ranks",
        ),
        (("policy.dtensor_cfg.tensor_parallel_size=2",), "2 does not divide the 5 training ranks; these would: 1, 5"),
        (
            ("policy.generation.vllm_cfg.tensor_parallel_size=2",),
            "2 does not divide the 3 GPUs that generate; these would: 1, 3",
        ),
        (
            ("policy.generation.vllm_cfg={tensor_parallel_size: 1, pipeline_parallel_size: 2}",),
            "pipeline_parallel_size: 2 x tensor_parallel_size=1 = 2 does not divide the 3 GPUs that generate",
        ),
    ],
)
def test_each_side_is_checked_by_its_own_ranks(overrides: tuple[str, ...], message: str) -> None:
    assert message in problems_of(APART, "cluster.gpus_per_node=8", f"{RESOURCES}.gpus_per_node=3", *overrides)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "num_nodes", "message"),
    [
        (4, 2, 2, None),
        (2, 4, 4, None),
        (8, 1, 2, "8 devices that share every layer have to be on one node of 4 GPUs; set it to one of 1, 2, 4"),
        (2, 3, 3, "3 x tensor_parallel_size=2 = 6 does not fill nodes of 4 GPUs; make it a multiple of 4"),
    ],
)
def test_the_stages_of_an_engine_may_lie_on_several_nodes(
    tensor: int, pipeline: int, num_nodes: int, message: str | None
) -> None:
    settings = (
        f"policy.generation.vllm_cfg={{tensor_parallel_size: {tensor}, pipeline_parallel_size: {pipeline}}}",
        "cluster.gpus_per_node=4",
        f"{RESOURCES}.num_nodes={num_nodes}",
        f"cluster.num_nodes={num_nodes + 1}",
        "policy.train_micro_batch_size=1",
    )
    if message is None:
        assert build(APART, *settings).policy.generation.vllm_cfg.engine_size == 8
    else:
        assert message in problems_of(APART, *settings)
