"""The placement that `--dry-run` of an evaluation describes. Starts nothing and loads no heavy package."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nemo_rl.algorithms.setup import placement
from nemo_rl.environments.config import environment_gpus, sections_of
from nemo_rl.evals.config import EvalMasterConfig

CPU_CONFIG = "examples/configs/evals/eval_cpu.yaml"


def describe_placement(cfg: EvalMasterConfig) -> str:
    """Describe the metric, the datasets with their environments, and the devices of the engines."""
    num, cluster = cfg.eval.num_tests_per_prompt, cfg.cluster
    size = cfg.generation.vllm_cfg.engine_size
    device = "GPU" if cluster.use_gpus else "CPU worker"
    metric = cfg.eval.metric.replace("k", str(cfg.eval.k_value))
    greedy = "greedy" if cfg.generation.temperature == 0 else f"at temperature {cfg.generation.temperature:g}"
    lines = [
        f"{metric} of {cfg.generation.model_name}, {num} sample{'s' if num > 1 else ''} of each prompt, {greedy}",
        "",
        "datasets:",
    ]
    for dataset in cfg.data.chosen:
        judge = cfg.environment_of(dataset)
        lines.append(f"  {dataset.dataset_name}: {cfg.processor_of(dataset)}, judged by env.{judge}")
    engines = cluster.num_workers // size
    lines += ["", f"{engines} vLLM engine{'s' if engines > 1 else ''} of {size} {device}{'s' if size > 1 else ''}:"]
    for engine in range(engines):
        node, first = divmod(engine * size, cluster.workers_per_node)
        devices = ", ".join(str(first + number) for number in range(size))
        lines.append(f"  engine {engine}: node {node}, {device} {devices}")
    return "\n".join(lines)


def check_hardware(
    cfg: EvalMasterConfig, *, num_gpus: int | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError if there are too few GPUs for engines and environments; see `placement.check_hardware`."""
    used = {cfg.environment_of(dataset) for dataset in cfg.data.chosen}
    apart = environment_gpus(sections_of(cfg.env, [name for name in used if name is not None]))
    placement.check_hardware(
        cfg, num_gpus=num_gpus, environment=environment, more_gpus=sum(apart.values()), cpu_config=CPU_CONFIG
    )
