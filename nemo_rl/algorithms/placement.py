"""What a GRPO run would place where, and whether this machine has it. Starts nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.algorithms.rollout_batch import token_budgets
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.parallel_sizes import ParallelSizes

SHORT_AXES = {
    "pipeline_parallel": "stage",
    "data_parallel": "data",
    "context_parallel": "context",
    "tensor_parallel": "tensor",
}
CPU_CONFIG = "examples/configs/grpo_math_cpu.yaml"


def describe_placement(cfg: GRPOMasterConfig) -> str:
    """Text for people: each rank's node and device, and how a step's samples are shared out."""
    return "\n".join([*_batch_lines(cfg), "", *_rank_lines(cfg)])


def _batch_lines(cfg: GRPOMasterConfig) -> list[str]:
    policy = cfg.policy
    num_ranks = ParallelSizes.of(policy.dtensor_cfg, cfg.cluster.num_workers).data_parallel
    samples = cfg.grpo.num_samples_per_step
    samples_per_rank_step = policy.train_global_batch_size // num_ranks
    rows = {
        "samples": f"{samples} = {cfg.grpo.num_prompts_per_step} prompts x {cfg.grpo.num_generations_per_prompt}",
        "optimizer steps": f"{samples // policy.train_global_batch_size} of {policy.train_global_batch_size} samples",
        "per data rank": f"{samples // num_ranks} samples; in each optimizer step {samples_per_rank_step}, as "
        f"{_micro_batches(policy, samples_per_rank_step)}",
        "tokens per sample": f"at most {policy.max_total_sequence_length}, "
        f"prompt at most {cfg.data.max_input_seq_length}",
    }
    return ["one step:", *(f"  {name:<19}{text}" for name, text in rows.items())]


def _micro_batches(policy: PolicyConfig, num_samples: int) -> str:
    train_tokens, _ = token_budgets(policy)
    if policy.sequence_packing.enabled:
        return f"micro-batches of at most {train_tokens} tokens, packed"
    if policy.dynamic_batching.enabled:
        return f"micro-batches of at most {train_tokens} tokens, padding included"
    return f"{num_samples // policy.train_micro_batch_size} micro-batches of {policy.train_micro_batch_size}"


def _rank_lines(cfg: GRPOMasterConfig) -> list[str]:
    cluster = cfg.cluster
    tensor_parallel = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    num_engines = cluster.num_workers // tensor_parallel
    sizes = ParallelSizes.of(cfg.policy.dtensor_cfg, cluster.num_workers)
    device = "GPU" if cluster.use_gpus else "CPU worker"
    sharing = "taking turns on the same devices" if cluster.use_gpus else "side by side"
    lines = [
        f"policy ({sizes.describe()}) and generation (vLLM, {num_engines} engine(s) of {tensor_parallel}), {sharing}:",
        f"  {'node':<6}{device:<12}{'policy':<42}generation",
    ]
    sharding = sizes.sharding()
    for rank in range(cluster.num_workers):
        node, index = divmod(rank, cluster.workers_per_node)
        engine, shard = divmod(rank, tensor_parallel)
        part = f" shard {shard}" if tensor_parallel > 1 else ""
        place = sharding.get_worker_coords(rank)
        axes = [f"{SHORT_AXES[axis]} {place[axis]}" for axis in SHORT_AXES if sharding.shape[axis] > 1]
        policy = f"rank {rank}" + (f" ({', '.join(axes)})" if axes else "")
        lines.append(f"  {node:<6}{index:<12}{policy:<42}engine {engine}{part}")
    return lines


def check_hardware(
    cfg: GRPOMasterConfig, *, num_gpus: int | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """ConfigError when the run asks for more GPUs than this machine shows and no Ray cluster could have them.

    `num_gpus` replaces what is found on this machine.
    """
    wanted = cfg.cluster.gpus_per_node
    if wanted == 0 or "RAY_ADDRESS" in environment or _a_cluster_runs_here():
        return
    found = num_visible_gpus(environment) if num_gpus is None else num_gpus
    path = ("cluster", "gpus_per_node")
    if found == 0:
        fix = f"to run on CPU take --config {CPU_CONFIG}; to use a Ray cluster that runs elsewhere set RAY_ADDRESS"
        raise ConfigError([Problem(path, f"{wanted} GPU(s) wanted and none found on this machine; {fix}")])
    if wanted > found:
        fix = f"set cluster.gpus_per_node={found}, or RAY_ADDRESS for a Ray cluster that runs elsewhere"
        raise ConfigError([Problem(path, f"{wanted} GPUs wanted, {found} found on this machine; {fix}")])


_RAY_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")  # written by `ray start`; ray.init joins what it names


def _a_cluster_runs_here() -> bool:
    """Whether something answers at the address in the file: it stays behind when a cluster is killed."""
    if not _RAY_CLUSTER_FILE.is_file():
        return False
    host, _, port = _RAY_CLUSTER_FILE.read_text().strip().rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except (OSError, ValueError):
        return False
    return True


def num_visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process started here could use, without importing torch."""
    devices = [device for device in Path("/dev").glob("nvidia[0-9]*") if device.name.removeprefix("nvidia").isdigit()]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in chosen:
        chosen = chosen[: chosen.index("-1")]
    return min(len(chosen), len(devices))
