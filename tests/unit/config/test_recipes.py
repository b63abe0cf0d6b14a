"""Every recipe: its placement by the command's own --dry-run, and its layout against the model's published sizes.

Those that train with Megatron are in test_megatron_configs.py, those of methods in test_methods.py.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

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
    **{"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}


def model(kind: Any, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, positions: int, **more: Any):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": positions}
    return kind(**sizes, **attention, **more)


MODELS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B-Instruct": model(
        LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 131072, rope_parameters=LLAMA3_ROPE
    ),
    "meta-llama/Llama-3.3-70B-Instruct": model(
        LlamaConfig, 128256, 8192, 28672, 80, 64, 8, 131072, rope_parameters=LLAMA3_ROPE
    ),
    "Qwen/Qwen2.5-7B-Instruct": model(Qwen2Config, 152064, 3584, 18944, 28, 28, 4, 32768),
    "Qwen/Qwen2.5-32B-Instruct": model(Qwen2Config, 152064, 5120, 27648, 64, 40, 8, 32768),
    "Qwen/Qwen3-8B": model(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128),
    "Qwen/Qwen3-32B": model(Qwen3Config, 151936, 5120, 25600, 64, 64, 8, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B": model(Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, **EXPERTS),
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
