"""What --dry-run says about a run, and the check for GPUs."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.placement import check_hardware, describe_placement, num_visible_gpus
from nemo_rl.config.errors import ConfigError
from tests.unit.config.run_configs import build


def test_ranks_engines_and_micro_batches() -> None:
    config = build(
        "cluster.gpus_per_node=4",
        "cluster.num_nodes=2",
        "policy.train_global_batch_size=128",
        "policy.train_micro_batch_size=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
    )
    lines = [" ".join(line.split()) for line in describe_placement(config).splitlines()]
    assert "optimizer steps 4 of 128 samples" in lines
    assert "per rank 64 samples; in each optimizer step 16, as 8 micro-batches of 2" in lines
    assert "0 1 rank 1 engine 0 shard 1" in lines
    assert "1 0 rank 4 engine 2 shard 0" in lines
    assert sum("rank " in line and "engine " in line and line[0].isdigit() for line in lines) == 8


def test_cpu_workers() -> None:
    text = describe_placement(build("cluster.gpus_per_node=0", "cluster.cpu_workers_per_node=2"))
    assert "CPU worker" in text and "GPU" not in text
    assert "rank 1" in text and "engine 1" in text


def test_no_gpu_names_the_cpu_config() -> None:
    with pytest.raises(ConfigError, match=r"examples/configs/grpo_math_cpu\.yaml"):
        check_hardware(build(), num_gpus=0, environment={})


def test_more_gpus_than_there_are() -> None:
    config = build("cluster.gpus_per_node=4")
    with pytest.raises(ConfigError, match=r"4 GPUs wanted, 2 found.*cluster.gpus_per_node=2"):
        check_hardware(config, num_gpus=2, environment={})
    check_hardware(config, num_gpus=4, environment={})


def test_a_cluster_elsewhere_or_a_cpu_run_needs_no_gpu_here() -> None:
    check_hardware(build(), num_gpus=0, environment={"RAY_ADDRESS": "10.0.0.1:6379"})
    check_hardware(build("cluster.gpus_per_node=0"), num_gpus=0, environment={})


def test_hidden_gpus_do_not_count() -> None:
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
