"""Refit of mixture-of-experts models into a real vLLM engine: fused in training, one tensor per expert on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.weight_loading import named_tensors
from nemo_rl.refit.layout import exported
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.refit.transfer import WeightSender
from tests.unit.generation.configs import engines, generation_config
from tests.unit.generation.test_refit_vllm import change, logprob_difference
from tests.unit.policy.test_moe import moe_config


class OneRankPolicy:
    """The refit side of a policy, in this process."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.names = ExpertNames(model.config.model_type)

    def prepare_refit(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        weights = [
            exported(part, lambda name=name, tensor=tensor, i=i: self.names.split(name, tensor)[i][1])
            for name, tensor in named_tensors(self.model)
            for i, (part, _) in enumerate(self.names.split(name, tensor))
        ]
        self.sender = WeightSender(weights, device=torch.device("cpu"), rank=0, local_rank=0, **settings)
        return [self.sender.describe()]

    def start_pack(self, bucket: int) -> list[dict[str, Any]]:
        return [self.sender.pack(bucket)]

    def finish_pack(self, future: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return future


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_logprobs_of_the_engine_are_those_of_the_model_after_every_sync(ray_local, tmp_path: Path, family: str):
    torch.manual_seed(0)
    config = moe_config(family, 4)
    config.vocab_size, config.hidden_size, config.max_position_embeddings, config.eos_token_id = 300, 128, 256, 2
    config.head_dim = 32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    accelerator = Accelerator(exclusive=False)
    accelerator.register(REFIT, lambda: None, lambda: None)
    how = {"accelerator": accelerator, "load_format": "dummy"}
    with engines(str(tmp_path), generation_config(), **how) as generation:
        policy: Any = OneRankPolicy(model)
        refit = Refit(policy, generation, accelerator, transport="packed_shm", wire_dtype="float32")
        for version in range(2):
            change(model, version)
            refit.sync(version)
            assert logprob_difference(model, generation, version) < 1e-5
        change(model, 2)
        assert logprob_difference(model, generation, 1) > 0.05, "this test would see stale weights"
