"""Every family of docs/models.md in the real engine: after a sync its logprobs are those of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.refit.sync import REFIT, Refit
from tests.unit.generation.configs import engines, generation_config
from tests.unit.generation.test_refit_vllm import ExpertsPolicy, change, logprob_difference
from tests.unit.policy.families import FAMILIES, save_random_model

# What vLLM's CPU target takes of a family: other settings than those of the table, and its precision.
_NO_EXPERTS = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
CHANGES: dict[str, dict[str, Any]] = {"llama4_text": {"attention_chunk_size": 128}, "nemotron_h": _NO_EXPERTS}
IN_BFLOAT16 = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_the_engine_are_those_of_the_model_after_every_sync(ray_local, tmp_path: Path, family: str):
    dtype, limit = ("bfloat16", 0.1) if family in IN_BFLOAT16 else ("float32", 1e-5)
    model = save_random_model(family, tmp_path, getattr(torch, dtype), **CHANGES.get(family, {}))
    if family == "gpt_oss":  # as the model is on disk: the engine is told that it gets ordinary weights
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    accelerator = Accelerator(exclusive=False)
    accelerator.register(REFIT, lambda: None, lambda: None)
    config = generation_config()
    config = config.model_copy(update={"vllm_cfg": config.vllm_cfg.model_copy(update={"precision": dtype})})
    with engines(str(tmp_path), config, accelerator=accelerator, load_format="dummy") as generation:
        policy: Any = ExpertsPolicy(model)
        refit = Refit(policy, generation, accelerator, transport="packed_shm", wire_dtype=dtype)
        for version in range(2):
            change(model, version)
            refit.sync(version)
            difference = logprob_difference(model, generation, version)
            print(family, version, difference)
            assert difference < limit
        change(model, 2)
        assert logprob_difference(model, generation, 1) > 5 * limit, "this test would see stale weights"
