"""FP8 in training and generation: what is asked for reaches Megatron and vLLM, what cannot work is refused by name."""

import re
from pathlib import Path

import pytest

from tests.tables import cases, pattern
from tests.unit.config.run_configs import problems_of
from tests.unit.generation.configs import generation_config
from tests.unit.policy.models import save_model

ON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.megatron_cfg.fp8_cfg.enabled=true",
)
CPU = ("cluster.gpus_per_node=0", "policy.precision=float32")
OF_TRAINING = """
policy.precision=float32 -> policy.megatron_cfg.fp8_cfg.enabled ... set that to bfloat16
policy.megatron_cfg.fp8_cfg.fp8_param=true -> policy.megatron_cfg.fp8_cfg.fp8_param ... still multiplies in FP8
policy.megatron_cfg.moe_token_dispatcher_type=allgather
    -> policy.megatron_cfg.moe_token_dispatcher_type ... set it to alltoall
policy.megatron_cfg.fp8_cfg.fp8_recipe=delayed & policy.megatron_cfg.activation_checkpointing=true
    & policy.megatron_cfg.recompute_granularity=selective & policy.megatron_cfg.recompute_modules=[layernorm]
    -> policy.megatron_cfg.fp8_cfg.fp8_recipe ... set tensorwise or blockwise
"""
OF_GENERATION = """
policy.generation.vllm_cfg.precision=fp8 -> vllm_cfg.precision ... runs on GPUs only; use policy.precision=float32
policy.generation.vllm_cfg.kv_cache_dtype=fp8 -> vllm_cfg.kv_cache_dtype ... runs on GPUs only; use auto
policy.generation.vllm_cfg.kv_cache_dtype=int8 -> vllm_cfg.kv_cache_dtype ... fp8_per_token_head
+policy.generation.vllm_kwargs.quantization=fp8
    -> vllm_kwargs.quantization ... policy.generation.vllm_cfg.precision decides it
+policy.generation.vllm_kwargs.seed=1 -> vllm_kwargs.seed ... engines have those of the run; remove the key
+policy.generation.vllm_kwargs.load_format=auto -> vllm_kwargs.load_format ... the library decides it; remove the key
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [((*ON, *given), told) for given, told in cases(OF_TRAINING)]
    + [((*CPU, *given), told) for given, told in cases(OF_GENERATION)],
)
def test_what_cannot_work_is_refused(given: tuple[str, ...], told: str) -> None:
    assert re.search(pattern(told), problems_of(*given))


@pytest.mark.slow
def test_what_vllm_is_told(tmp_path: Path) -> None:
    from nemo_rl.models.generation.interfaces import EngineSettings
    from nemo_rl.models.generation.vllm.startup import engine_args

    save_model("deep", tmp_path)
    cfg = generation_config(64, vllm_cfg={"precision": "fp8", "kv_cache_dtype": "fp8_per_token_head"})
    settings = EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path), cfg=cfg, device="cuda", seed=0)
    told = engine_args(settings, {})
    assert (told.dtype, told.quantization, told.kv_cache_dtype) == ("bfloat16", "fp8_per_block", "fp8_per_token_head")
