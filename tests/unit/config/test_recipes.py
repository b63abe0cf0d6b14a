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
from transformers import PretrainedConfig

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.config import token_budgets
from nemo_rl.models.policy.dtensor.checks import check_layout
from nemo_rl.models.policy.layout import training_sizes
from tests.unit.config.run_configs import CONFIGS, ROOT
from tools.standin.shapes import MODELS

RECIPES = [
    *sorted((CONFIGS / "recipes" / "llm").glob("*.yaml")),
    *(CONFIGS / f"grpo_math_{model}_megatron.yaml" for model in ("8B", "70B", "qwen30ba3b")),
]


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
