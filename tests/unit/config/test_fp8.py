"""FP8 in training and generation: what is asked for reaches Megatron and vLLM, what cannot work is refused by name."""

from pathlib import Path

import pytest

from nemo_rl.models.generation.config import VllmConfig
from tests.unit.config.run_configs import problems_of
from tests.unit.generation.configs import generation_config
from tests.unit.policy.models import save_model

KEY = "policy.megatron_cfg"
ON = ("policy.dtensor_cfg.enabled=false", f"{KEY}.enabled=true", "policy.optimizer=null", f"{KEY}.fp8_cfg.enabled=true")
CPU = ("cluster.gpus_per_node=0", "policy.precision=float32")
VLLM, KWARGS = "policy.generation.vllm_cfg", "policy.generation.vllm_kwargs"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ((*ON, "policy.precision=float32"), f"{KEY}.fp8_cfg.enabled", "set that to bfloat16"),
        ((*ON, f"{KEY}.fp8_cfg.fp8_param=true"), f"{KEY}.fp8_cfg.fp8_param", "still multiplies in FP8"),
        (
            (*ON, f"{KEY}.moe_token_dispatcher_type=allgather"),
            f"{KEY}.moe_token_dispatcher_type",
            "set it to alltoall",
        ),
        (
            (
                *ON,
                f"{KEY}.fp8_cfg.fp8_recipe=delayed",
                f"{KEY}.activation_checkpointing=true",
                f"{KEY}.recompute_granularity=selective",
                f"{KEY}.recompute_modules=[layernorm]",
            ),
            f"{KEY}.fp8_cfg.fp8_recipe",
            "set tensorwise or blockwise",
        ),
        ((*CPU, f"{VLLM}.precision=fp8"), f"{VLLM}.precision", "runs on GPUs only; use policy.precision=float32"),
        ((*CPU, f"{VLLM}.kv_cache_dtype=fp8"), f"{VLLM}.kv_cache_dtype", "runs on GPUs only; use auto"),
        ((f"{VLLM}.kv_cache_dtype=int8",), f"{VLLM}.kv_cache_dtype", "fp8_per_token_head"),
        ((f"+{KWARGS}.quantization=fp8",), f"{KWARGS}.quantization", "policy.generation.vllm_cfg.precision decides it"),
        ((f"+{KWARGS}.seed=1",), f"{KWARGS}.seed", "engines have those of the run; remove the key"),
        ((f"+{KWARGS}.load_format=auto",), f"{KWARGS}.load_format", "the library decides it; remove the key"),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], key: str, message: str) -> None:
    problem = problems_of(*overrides)
    assert key in problem and message in problem


@pytest.mark.slow
def test_what_vllm_is_told(tmp_path: Path) -> None:
    from nemo_rl.models.generation.vllm.worker import EngineSettings, engine_args

    save_model("deep", tmp_path)
    asked = VllmConfig(precision="fp8", kv_cache_dtype="fp8_per_token_head", max_model_len=64)
    cfg = generation_config().model_copy(update={"vllm_cfg": asked})
    settings = EngineSettings(model=str(tmp_path), tokenizer=str(tmp_path), cfg=cfg, device="cuda", seed=0)
    told = engine_args(settings, {})
    assert (told.dtype, told.quantization, told.kv_cache_dtype) == ("bfloat16", "fp8_per_block", "fp8_per_token_head")
