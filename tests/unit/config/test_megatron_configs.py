"""Configurations that train large models with Megatron Core: their --dry-run, layout and memory, from config.json."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.config import token_budgets
from nemo_rl.models.policy.layout import MegatronSizes, stage_layers
from nemo_rl.models.policy.megatron.checks import check_experts, check_rope, check_tensor_parallel
from tests.unit.config.test_recipes import EXPERTS, MODELS, ROOT, SCRIPT, model

CONFIGS = (
    "grpo_math_8B_megatron",
    "grpo_math_70B_megatron",
    "grpo_math_qwen30ba3b_megatron",
    "recipes/llm/grpo-deepseek-v3-32n8g",
    "recipes/llm/grpo-qwen3-235ba22b-24n8g",
)
# As published in their config.json.
DEEPSEEK = DeepseekV3Config(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, n_group=8,
    num_experts_per_tok=8, topk_group=4, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840,
)  # fmt: skip
QWEN3_235B = model(
    Qwen3MoeConfig, 151936, 4096, 12288, 94, 64, 4, 40960, head_dim=128, **EXPERTS | {"moe_intermediate_size": 1536}
)


def model_of(config: GRPOMasterConfig) -> PretrainedConfig:
    more = {"unsloth/DeepSeek-V3-bf16": DEEPSEEK, "Qwen/Qwen3-235B-A22B": QWEN3_235B}
    return {**MODELS, **more}[config.policy.model_name]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request) -> tuple[Path, GRPOMasterConfig]:
    path = ROOT / "examples" / "configs" / f"{request.param}.yaml"
    return path, load_config(GRPOMasterConfig, path)


def dry_run(
    path: Path, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    arguments = ["--config", str(path), "--dry-run", f"policy.model_name={directory}"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_dry_run_proves_the_placement(case, tmp_path, capsys, monkeypatch) -> None:
    """Of a model directory without weights: every training rank has a GPU and a place in the layout of its own."""
    path, config = case
    (tmp_path / "config.json").write_text(json.dumps(model_of(config).to_dict()), encoding="utf-8")
    lines = dry_run(path, tmp_path, capsys, monkeypatch)
    table = lines[lines.index(next(line for line in lines if line.startswith("  node"))) + 1 :]
    ranks = [match for line in table if (match := re.match(r"\s+(\d+)\s+(\d+)\s+rank (\d+)( \([^)]*\))?", line))]
    num_ranks, per_node = config.training_cluster.num_workers, config.cluster.gpus_per_node
    assert [int(match[3]) for match in ranks] == list(range(num_ranks))
    assert [(int(match[1]), int(match[2])) for match in ranks] == [divmod(rank, per_node) for rank in range(num_ranks)]
    assert len({match[4] for match in ranks}) == num_ranks
    sizes = MegatronSizes.of_megatron(config.policy.megatron_cfg, num_ranks)
    assert sizes.world_size == num_ranks
    assert sizes.tensor_parallel <= per_node and sizes.expert_parallel <= per_node, "their traffic stays on a node"


def test_dry_run_of_deepseek_v3_says_who_holds_what(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK.to_dict()), encoding="utf-8")
    path = ROOT / "examples" / "configs" / "recipes" / "llm" / "grpo-deepseek-v3-32n8g.yaml"
    lines = [" ".join(line.split()) for line in dry_run(path, tmp_path, capsys, monkeypatch)]
    for line in (
        "layout on 256 GPUs on 32 nodes:",
        "training 128 GPUs on 16 nodes",
        "parameters Megatron Core, 16 stages x tensor 8",
        "stages 0: layers 0-2; 1 to 14: 4 layers each (3-58); 15: layers 59-60",
        "experts 256 of a layer, over groups of 8 ranks, 32 on each",
        "optimizer adam, its state on the rank that holds the parameter; 100% of it in host memory",
        "generation vLLM, 4 engines of 32 GPUs, on 128 GPUs on 16 nodes of its own; weights by NCCL",
        "15 7 rank 127 (stage 15, tensor 7, experts 7)",
        "31 7 engine 3 shard 31",
    ):
        assert line in lines


def test_the_layout_fits_the_published_model(case) -> None:
    _, config = case
    policy, model = config.policy, model_of(config)
    check_tensor_parallel(policy.megatron_cfg, model)
    check_experts(policy, model)
    check_rope(policy, model)
    assert stage_layers(policy.megatron_cfg, model.num_hidden_layers)
    assert model.num_attention_heads % policy.generation.vllm_cfg.tensor_parallel_size == 0
    assert policy.max_total_sequence_length <= model.max_position_embeddings
    train, logprobs = token_budgets(policy)
    assert policy.max_total_sequence_length <= train <= logprobs
