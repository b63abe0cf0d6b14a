"""The part of an engine that is on another node than its scheduler. vllm is imported inside functions only."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.interfaces import EngineDied
from nemo_rl.models.generation.vllm.nodes import EngineNodes
from nemo_rl.models.generation.vllm.routed_experts import routed_experts_arguments
from nemo_rl.models.generation.vllm.worker import VllmWorker, engine_args, prepare_environment
from nemo_rl.refit.layout import Transport


class VllmFollower:
    """Starts the ranks of one more node, which take their orders from the engine's first node.

    Args: those of `VllmWorker`.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str,
        cfg: GenerationConfig,
        *,
        device: Literal["cpu", "cuda"],
        seed: int,
        load_format: Literal["dummy", "auto"] = "dummy",
        weight_transfer: Transport = "packed_shm",
        replica: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        nodes = EngineNodes.join()
        self._name = f"node {nodes.rank} of generation replica {replica}"
        prepare_environment(device, cfg.vllm_cfg.engine_size)

        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = engine_args(model, tokenizer, cfg, device, seed, load_format, weight_transfer, nodes)
        if return_routed_experts:
            arguments = replace(arguments, **routed_experts_arguments(cfg, device))
        # Its processes end with this one: they watch a pipe from it.
        self._executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
        self._executor.start_worker_monitor()

    def check_health(self) -> None:
        """Raises EngineDied when one of its processes is gone."""
        if self._executor.is_failed:
            raise EngineDied(f"a process of {self._name} died; its last words are in the log")

    def shutdown(self) -> None:
        """End its processes."""
        self._executor.shutdown()


def start_rank(*args: Any, **kwargs: Any) -> VllmWorker | VllmFollower:
    """The worker of an engine's node, by the rank that its worker group gives it."""
    return VllmWorker(*args, **kwargs) if os.environ["RANK"] == "0" else VllmFollower(*args, **kwargs)
