"""What vLLM is told and made to do, as far as no GPU is needed; one engine, which records experts."""

import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm.config import VllmConfig
from nemo_rl.types import SamplingParams
from tests.unit.generation.configs import ask, engine_settings, engines, generation_config, requests_of
from tests.unit.generation.models import make_model
from tests.unit.policy.families import family_config
from tests.unit.policy.models import save_model

pytestmark = pytest.mark.slow  # they import vLLM


def settings_for(path: Path, precision: str, device: Any, **vllm_kwargs: Any) -> EngineSettings:
    return engine_settings(path, generation_config(vllm_cfg={"precision": precision}, **vllm_kwargs), device=device)


def args_of(settings: EngineSettings) -> Any:
    from nemo_rl.models.generation.vllm.startup import engine_args

    return engine_args(settings, {})


def test_logits_are_float32_and_overrides_add_up(tmp_path: Path) -> None:
    make_model(tmp_path)
    half = replace(settings_for(tmp_path, "bfloat16", "cuda"), hf_overrides={"rope_theta": 5.0})
    assert args_of(half).hf_overrides == {"head_dtype": "float32", "rope_theta": 5.0}
    users = {"head_dtype": "model", "rope_theta": 7.0}
    asked = settings_for(tmp_path, "bfloat16", "cuda", hf_overrides=users)
    assert args_of(replace(asked, hf_overrides={"rope_theta": 5.0, "a": 1})).hf_overrides == users | {"a": 1}
    assert args_of(settings_for(tmp_path, "float32", "cpu")).hf_overrides == {}


def test_queries_of_llama_4_are_scaled_and_routers_of_deepseek_v3_score_as_in_training(tmp_path: Path) -> None:
    """vLLM would decide by max_model_len."""
    settings = settings_for(tmp_path, "float32", "cpu")
    for tuned in (True, False):
        family_config("llama4_text", attn_temperature_tuning=tuned).save_pretrained(tmp_path)
        assert args_of(settings).override_generation_config == {"attn_temperature_tuning": tuned}
        asked = replace(settings, hf_overrides={"attn_temperature_tuning": not tuned})
        assert args_of(asked).override_generation_config == {"attn_temperature_tuning": not tuned}
    family_config("deepseek_v3").save_pretrained(tmp_path)
    assert args_of(settings).hf_overrides == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def test_raw_logprobs_are_those_of_the_model_whatever_may_not_be_sampled(ray_local: None, tmp_path: Path) -> None:
    make_model(tmp_path)
    tokenizer, model = build_tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = generation_config(vllm_cfg={"logprobs_mode": "raw_logprobs"})
    words = tuple(tokenizer.decode([token]) for token in range(20, 60))
    requests = requests_of([[10, 20, 30]] * 4, SamplingParams(max_new_tokens=8, bad_words=words))
    with engines(str(tmp_path), config) as generation:
        completions = ask(generation.workers[0], requests)
    for completion in completions:
        ids = torch.tensor([[10, 20, 30, *completion.token_ids]])
        whole = model(ids).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
        assert torch.tensor(completion.logprobs).sub(whole).abs().max() < 1e-5


def test_on_gpus_vllm_chooses_the_size_of_a_step(tmp_path: Path) -> None:
    from vllm.usage.usage_lib import UsageContext

    from nemo_rl.models.generation.vllm.startup import engine_config

    make_model(tmp_path)
    settings = settings_for(tmp_path, "bfloat16", "cuda")
    asked, on_cpu = settings_for(tmp_path, "bfloat16", "cuda", max_num_seqs=7), settings_for(tmp_path, "float32", "cpu")
    chosen, *others = map(args_of, (settings, asked, on_cpu))
    assert VllmConfig.argument_names() == set(vars(chosen)), "read from the source"
    sizes = [(args.max_num_seqs, args.max_num_batched_tokens) for args in (chosen, *others)]
    assert sizes == [(None, None), (7, None), (256, 8192)]
    colocated = settings.cfg.colocated
    awake = {"colocated": colocated.model_copy(update={"enabled": False})}  # a CPU has no sleep mode
    apart = replace(settings, cfg=settings.cfg.model_copy(update=awake))
    tokens, requests = (defaults[UsageContext.LLM_CLASS] for defaults in chosen.get_batch_defaults(1))
    scheduler = engine_config(apart, {}).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, requests), "those of its usage"


def test_triton_computes_float32_in_float32() -> None:
    """Its default is TF32, three digits, in vLLM's kernel of attention: more than 1e-4 between trainer and engine."""
    code = """
from triton import knobs
from nemo_rl.models.generation.vllm.config import VllmConfig
from nemo_rl.models.generation.vllm.startup import prepare_environment
for precision, found in (("bfloat16", None), ("float32", "ieee")):
    prepare_environment("cuda", VllmConfig(precision=precision, max_model_len=64))
    assert knobs.language.fp32_default == found
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_attention_of_a_few_tokens_in_bfloat16_ends_no_process() -> None:
    """The first kernel of a process that uses AMX, on a CPU that has it: an engine's first step may be one token."""
    code = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from nemo_rl.models.generation.vllm import plugins
plugins.enable()
plugins.tiles_that_linux_grants()
isa, scale = _get_attn_isa(torch.bfloat16, 32, 32), 32**-0.5
query, key, value = (torch.randn(3, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
keys, values = torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16).chunk(2, dim=2)
ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(3), isa)
starts, lengths, table = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 3], [3], [[0]]))
plan = ops.cpu_attn_get_scheduler_metadata(1, 4, 2, 32, lengths, torch.bfloat16, starts, True, -1, isa, False)
got = torch.empty_like(query)
ops.cpu_attention_with_kv_cache(
    query, keys, values, got, starts, lengths, scale, True, None, -1, table, 0.0, plan, None
)
rows = [part.float().transpose(0, 1) for part in (query, key, value)]
want = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)
assert (got - want).abs().max() < 0.03
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the experts of a real engine, against those of transformers for the same tokens

MAX_MODEL_LEN, LAYERS, TOP_K = 96, 3, 2


def test_experts_of_every_token_but_the_last_are_those_of_transformers(ray_local: None, tmp_path: Path) -> None:
    """Of a random Qwen3-MoE whose second layer is dense."""
    tokenizer, experts = build_tiny_tokenizer(), {"num_experts": 8, "mlp_only_layers": [1], "num_hidden_layers": LAYERS}
    save_model("qwen3-moe", tmp_path, vocab_size=len(tokenizer), head_dim=32, **experts)  # the least of vLLM on CPU
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted: dict[int, torch.Tensor] = {}  # by layer, of the latest pass: int64 [T, TOP_K]
    for layer in (0, 2):
        keep = partial(lambda layer, router, args, output: wanted.update({layer: output[2]}), layer)
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(keep)
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 260) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    with engines(str(tmp_path), generation_config(MAX_MODEL_LEN), return_routed_experts=True) as engine:
        completions = ask(engine.workers[0], requests_of(prompts, SamplingParams(max_new_tokens=30)))
    same: list[bool] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        found, tokens = completion.routed_experts, prompt + completion.token_ids
        assert (found.dtype, found.shape) == (np.uint8, (len(tokens) - 1, LAYERS, TOP_K))
        assert not found[:, 1].any(), "a dense layer has no experts"
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens[:-1]]))
        for layer, want in wanted.items():
            got = torch.from_numpy(found[:, layer].astype(np.int64))
            same += (got.sort(dim=1).values == want.sort(dim=1).values).all(dim=1).tolist()
    assert len(same) > 300
    assert sum(same) >= 0.99 * len(same), "but for scores that differ in the last bits"
