"""Generation configurations of the tests, and real engines with them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.config import GenerationConfig, OwnEngineConfig, SglangConfig, VllmConfig
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.replicas import EngineGeneration
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.types import Completion, GenerationRequest, SamplingParams


def generation_config(
    max_model_len: int = 128, *, vllm_cfg: Mapping[str, Any] | None = None, **vllm_kwargs: Any
) -> GenerationConfig:
    """`vllm_cfg`: differences from an engine in float32 on one rank."""
    engine = {"precision": "float32", "max_model_len": max_model_len} | dict(vllm_cfg or {})
    validation: Any = {"val_temperature": 1.0, "val_top_p": 1.0, "val_top_k": None}
    engine_cfg = VllmConfig.model_validate(engine)
    others: Any = {
        "sglang_cfg": SglangConfig(dtype="float32", context_length=max_model_len),
        "engine_cfg": OwnEngineConfig(precision="float32", max_model_len=max_model_len),
    }
    return GenerationConfig(max_new_tokens=32, vllm_cfg=engine_cfg, vllm_kwargs=vllm_kwargs, **others, **validation)


def engine_settings(model: Any, config: GenerationConfig, **settings: Any) -> EngineSettings:
    return EngineSettings(model=str(model), tokenizer=str(model), cfg=config, seed=0, **settings)


@contextmanager
def engines(
    model: Any,
    config: GenerationConfig,
    *,
    replicas: int = 1,
    num_nodes: int = 1,
    accelerator: Any = None,
    kind: type[EngineGeneration] = VllmGeneration,
    **more: Any,
) -> Iterator[Any]:
    """Real engines, which end with the block. `num_nodes` are groups of processes of this machine."""
    bundles = [replicas * config.engine.engine_size // num_nodes] * num_nodes
    engine = engine_settings(model, config, **{"load_format": "auto"} | more)
    accelerator = accelerator or Accelerator(exclusive=False)
    with RayVirtualCluster(bundles, use_gpus=False, name=f"engines of {model}") as cluster:
        generation = kind(cluster, engine, accelerator=accelerator, timeout_s=120)
        yield generation
        generation.shutdown()


@contextmanager
def refitted_engines(
    policy: Any, model: Path, config: GenerationConfig, engine: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[VllmGeneration, Refit]]:
    """Engines with weights of no meaning, and the refit that brings them the policy's; both may have settings."""
    accelerator = Accelerator(exclusive=False)
    accelerator.register(REFIT, lambda: None, lambda: None)
    how = {"transport": "packed_shm", "wire_dtype": config.vllm_cfg.precision, **settings}
    with engines(str(model), config, accelerator=accelerator, load_format="dummy", **(engine or {})) as generation:
        yield generation, Refit(policy, generation, accelerator, **how)


def requests_of(prompts: Iterable[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    """One for each prompt; the seed is its number."""
    return [
        GenerationRequest(prompt_token_ids=prompt, sampling=sampling, seed=number)
        for number, prompt in enumerate(prompts)
    ]


def ask(worker: Any, requests: Iterable[GenerationRequest]) -> list[Completion]:
    """The completions of an engine."""
    return ray.get([worker.call.remote("generate", request) for request in requests], timeout=800)
