"""Every recipe: its placement by the command's own --dry-run, and its layout against the model's published sizes.

Those that train with Megatron are in test_megatron_configs.py, those of methods in test_methods.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.config import token_budgets
from nemo_rl.models.policy.dtensor.checks import check_layout
from nemo_rl.models.policy.layout import ParallelSizes

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "run_grpo_math.py"
WITH_MEGATRON = {"grpo-deepseek-v3-32n8g", "grpo-qwen3-235ba22b-24n8g"}
RECIPES = [
    path
    for path in sorted((ROOT / "examples" / "configs" / "recipes" / "llm").glob("*.yaml"))
    if path.stem not in WITH_MEGATRON
]

# As published in the models' config.json.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3_ROPE,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3_ROPE,
    ),
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    ),
    "Qwen/Qwen2.5-32B-Instruct": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=32768,
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "Qwen/Qwen3-32B": Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
    ),
}


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request) -> Path:
    return request.param


def load(recipe: Path) -> GRPOMasterConfig:
    return load_config(GRPOMasterConfig, recipe)


def test_the_promised_models_have_recipes() -> None:
    assert {load(path).policy.model_name for path in RECIPES} == set(MODELS)


def test_dry_run_proves_the_placement(recipe, capsys, monkeypatch) -> None:
    """Through the command's own main function: one line per rank, each on a GPU of its own."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--config", str(recipe), "--dry-run"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    config = load(recipe)
    ranks = [line.split() for line in lines[lines.index(next(li for li in lines if li.startswith("  node"))) + 1 :]]
    per_node, num_ranks = config.cluster.gpus_per_node, config.cluster.num_workers
    assert [row[:2] for row in ranks] == [[str(rank // per_node), str(rank % per_node)] for rank in range(num_ranks)]
    assert [row[2:4] for row in ranks] == [["rank", str(rank)] for rank in range(num_ranks)]
    engines = [int(row[row.index("engine") + 1]) for row in ranks]
    nodes_of = {engine: {row[0] for row, e in zip(ranks, engines, strict=True) if e == engine} for engine in engines}
    assert all(len(nodes) == 1 for nodes in nodes_of.values()), "an engine on two nodes"
    places = {" ".join(row[4 : row.index("engine")]) for row in ranks}
    sizes = ParallelSizes.of(config.policy.dtensor_cfg, num_ranks)
    assert len(places) == num_ranks and sizes.world_size == num_ranks


def test_the_layout_fits_the_published_model(recipe) -> None:
    policy = load(recipe).policy
    model = MODELS[policy.model_name]
    check_layout(policy, model)
    engine = policy.generation.vllm_cfg
    assert model.num_attention_heads % engine.tensor_parallel_size == 0
    assert policy.max_total_sequence_length <= model.max_position_embeddings


def test_lengths_and_budgets_leave_room(recipe) -> None:
    config = load(recipe)
    policy = config.policy
    assert config.data.max_input_seq_length <= policy.max_total_sequence_length // 2, "no room to answer"
    assert policy.sequence_packing.enabled
    train, logprobs = token_budgets(policy)
    assert policy.max_total_sequence_length <= train <= logprobs
    num_data_ranks = ParallelSizes.of(policy.dtensor_cfg, config.cluster.num_workers).data_parallel
    assert policy.train_global_batch_size // num_data_ranks >= 16, "too few samples to pack and share out evenly"
