"""Every recipe of a model: its placement by the command's own --dry-run, and its layout against the published sizes.

Those of methods are in test_methods.py.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.config import token_budgets
from nemo_rl.models.policy.dtensor.checks import check_layout
from nemo_rl.models.policy.layout import training_sizes
from tests.unit.config.run_configs import CONFIGS, ROOT

RECIPES = [
    *sorted((CONFIGS / "recipes" / "llm").glob("*.yaml")),
    *(CONFIGS / f"grpo_math_{model}_megatron.yaml" for model in ("8B", "70B", "qwen30ba3b")),
]

# As published in the models' config.json.
_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = {"rope_parameters": _ROPE | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}


def model(kind: Any, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, positions: int, **more: Any):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": positions}
    return kind(**sizes, **attention, **more)


MODELS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B-Instruct": model(LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 131072, **LLAMA3_ROPE),
    "meta-llama/Llama-3.3-70B-Instruct": model(LlamaConfig, 128256, 8192, 28672, 80, 64, 8, 131072, **LLAMA3_ROPE),
    "Qwen/Qwen2.5-7B-Instruct": model(Qwen2Config, 152064, 3584, 18944, 28, 28, 4, 32768),
    "Qwen/Qwen2.5-32B-Instruct": model(Qwen2Config, 152064, 5120, 27648, 64, 40, 8, 32768),
    "Qwen/Qwen3-8B": model(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128),
    "Qwen/Qwen3-32B": model(Qwen3Config, 151936, 5120, 25600, 64, 64, 8, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B": model(Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, **EXPERTS),
    "Qwen/Qwen3-235B-A22B": model(
        Qwen3MoeConfig, 151936, 4096, 12288, 94, 64, 4, 40960, head_dim=128, **EXPERTS | {"moe_intermediate_size": 1536}
    ),
    "unsloth/DeepSeek-V3-bf16": DeepseekV3Config(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, n_group=8,
        num_experts_per_tok=8, topk_group=4, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840,
    ),
}  # fmt: skip


def dry_run(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *given: Any) -> str:
    """The output of the command's own main function."""
    monkeypatch.setattr(sys, "argv", [str(word) for word in (script, *given, "--dry-run")])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(script), run_name="__main__")
    assert exit_.value.code == 0
    return capsys.readouterr().out


def check_lengths_and_budgets(config: GRPOMasterConfig, model: PretrainedConfig) -> None:
    policy = config.policy
    if not policy.megatron_cfg.enabled:  # the dry run checks Megatron's
        check_layout(policy, model)
    assert model.num_attention_heads % policy.generation.vllm_cfg.tensor_parallel_size == 0
    longest = policy.max_total_sequence_length
    assert longest <= model.max_position_embeddings
    assert config.data.max_input_seq_length <= longest // 2, "no room to answer"
    train, logprobs = token_budgets(policy)
    assert longest <= train <= logprobs
    num_data_ranks = training_sizes(policy, config.training_cluster.num_workers).data_parallel
    assert policy.train_global_batch_size // num_data_ranks >= 16, "too few samples to pack and share out evenly"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run_proves_the_placement_and_the_published_model_fits(path, tmp_path, capsys, monkeypatch) -> None:
    """Every training rank has a GPU and a place in the layout of its own. The model directory has no weights."""
    config = load_config(GRPOMasterConfig, path)
    model = MODELS[config.policy.model_name]
    check_lengths_and_budgets(config, model)
    (tmp_path / "config.json").write_text(json.dumps(model.to_dict()), encoding="utf-8")
    script = ROOT / "examples" / "run_grpo_math.py"
    text = dry_run(script, capsys, monkeypatch, "--config", path, f"policy.model_name={tmp_path}")
    table = text.partition("\n  node")[2]
    ranks = re.findall(r"\n\s+(\d+)\s+(\d+)\s+rank (\d+)( \([^)]*\))?(?:\s+engine (\d+))?", table)
    num_ranks, per_node = config.training_cluster.num_workers, config.cluster.gpus_per_node
    assert [int(rank) for _, _, rank, _, _ in ranks] == list(range(num_ranks))
    assert [(int(node), int(gpu)) for node, gpu, *_ in ranks] == [divmod(rank, per_node) for rank in range(num_ranks)]
    assert len({place for *_, place, _ in ranks}) == num_ranks
    nodes = {(engine, node) for node, *_, engine in ranks if engine}
    assert len(nodes) == len({engine for engine, _ in nodes}), "an engine on two nodes"
    sizes = training_sizes(config.policy, num_ranks)
    assert sizes.world_size == num_ranks
    assert sizes.tensor_parallel <= per_node and sizes.expert_parallel <= per_node, "their traffic stays on a node"
    if "deepseek" in path.stem:
        assert set(OF_DEEPSEEK) <= {" ".join(line.split()) for line in text.splitlines()}


OF_DEEPSEEK = (
    "layout on 256 GPUs on 32 nodes:",
    "training 128 GPUs on 16 nodes",
    "parameters Megatron Core, 16 stages x tensor 8",
    "stages 0: layers 0-2; 1 to 14: 4 layers each (3-58); 15: layers 59-60",
    "experts 256 of a layer, over groups of 8 ranks, 32 on each",
    "optimizer adam, its state on the rank that holds the parameter; 100% of it in host memory",
    "generation vLLM, 4 engines of 32 GPUs, on 128 GPUs on 16 nodes of its own; weights by NCCL",
    "15 7 rank 127 (stage 15, tensor 7, experts 7)",
    "31 7 engine 3 shard 31",
)
