"""The experts that a real engine says every token went through, against those of transformers for the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.generation.vllm.worker import EngineSettings, engine_args
from nemo_rl.types import Completion, SamplingParams
from tests.unit.generation.configs import engines, generation_config

MAX_MODEL_LEN, LAYERS, TOP_K = 96, 3, 2


def make_model(directory: Path) -> PreTrainedModel:
    """A random Qwen3-MoE whose second layer is dense, with the tiny model's tokenizer."""
    tokenizer = build_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def experts_of_transformers(model: PreTrainedModel, token_ids: list[int]) -> dict[int, torch.Tensor]:
    """By layer: int64 [T, TOP_K]."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda router, args, output: found.update({layer: output[2]})

    hooks = [
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(keep(layer)) for layer in (0, 2)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
def test_experts_of_every_token_but_the_last_are_those_of_transformers(ray_local: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    path = str(tmp_path / "model")
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 260) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    with engines(path, generation_config(MAX_MODEL_LEN), return_routed_experts=True) as engine:
        calls = [
            engine.workers[0].call.remote("generate", prompt, SamplingParams(max_new_tokens=5 + 3 * n), n)
            for n, prompt in enumerate(prompts)
        ]
        completions: list[Completion] = ray.get(calls, timeout=100)
    num_same = num_all = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        experts = completion.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        tokens = prompt + completion.token_ids
        assert experts.shape == (len(tokens) - 1, LAYERS, TOP_K)
        assert not experts[:, 1].any(), "a dense layer has no experts"
        for layer, want in experts_of_transformers(model, tokens[:-1]).items():
            got = torch.from_numpy(experts[:, layer].astype(np.int64))
            same = (got.sort(dim=1).values == want.sort(dim=1).values).all(dim=1)
            num_same += int(same.sum())
            num_all += len(same)
    assert num_all > 300
    assert num_same >= 0.99 * num_all, "but for scores that differ in the last bits"


def test_an_engine_on_gpus_returns_them_itself(tmp_path: Path) -> None:
    make_model(tmp_path)
    cfg, path = generation_config(MAX_MODEL_LEN), str(tmp_path)
    settings = EngineSettings(model=path, tokenizer=path, cfg=cfg, device="cpu", seed=0, return_routed_experts=True)
    assert not engine_args(settings, {}).enable_return_routed_experts
    assert engine_args(replace(settings, device="cuda"), {}).enable_return_routed_experts
