"""What --dry-run says about a run, and the check for GPUs."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.setup.hardware import check_hardware
from nemo_rl.algorithms.setup.placement import describe_placement
from nemo_rl.config.errors import ConfigError
from tests.unit.config.run_configs import build


def lines_of(*overrides: str) -> list[str]:
    return [" ".join(line.split()) for line in describe_placement(build(*overrides)).splitlines()]


def ranks_of(lines: list[str]) -> list[str]:
    return lines[lines.index("node GPU policy generation") + 1 :]


def test_every_axis_of_a_layout_is_shown() -> None:
    lines = lines_of(
        "cluster.gpus_per_node=8",
        "cluster.num_nodes=4",
        "policy.dtensor_cfg.pipeline_parallel_size=2",
        "policy.dtensor_cfg.dp_replicate_size=2",
        "policy.dtensor_cfg.context_parallel_size=2",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.dtensor_cfg.expert_parallel_size=2",
        "policy.dtensor_cfg.lora_cfg={enabled: true, match_all_linear: false, target_modules: [q_proj, v_proj]}",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 1024, logprob_mb_tokens: 4096}",
    )
    assert "per data rank 128 samples, 128 in each optimizer step" in lines
    assert "micro-batches packed, at most 1024 tokens; for logprobs alone 4096; each cut over 2 context ranks" in lines
    assert "policy m on 32 ranks: 2 pipeline x 4 data x 2 context x 2 tensor" in lines
    assert (
        "parameters 2 stages x tensor 2 x FSDP2 over 4; experts over groups of 2, then FSDP2 over 2; 2 copies (HSDP)"
        in lines
    )
    assert "trained adapters of rank 8 on q_proj, v_proj; the model itself is frozen" in lines
    ranks = ranks_of(lines)
    assert len(ranks) == 32
    assert ranks[0] == "0 0 rank 0 (stage 0, copy 0, data 0, context 0, tensor 0, experts 0) engine 0"
    assert ranks[13] == "1 5 rank 13 (stage 0, copy 1, data 3, context 0, tensor 1, experts 0) engine 13"
    assert ranks[-1] == "3 7 rank 31 (stage 1, copy 1, data 3, context 1, tensor 1, experts 1) engine 31"


def test_no_gpu_names_the_cpu_config() -> None:
    with pytest.raises(ConfigError, match=r"examples/configs/grpo_math_cpu\.yaml"):
        check_hardware(build(), num_gpus=0, environment={})


def test_more_gpus_than_there_are() -> None:
    config = build("cluster.gpus_per_node=4")
    with pytest.raises(ConfigError, match=r"4 GPUs wanted, 2 found.*cluster.gpus_per_node=2"):
        check_hardware(config, num_gpus=2, environment={})
    check_hardware(config, num_gpus=4, environment={})


def test_a_cluster_elsewhere_or_a_cpu_run_needs_no_gpu_here() -> None:
    check_hardware(build(), num_gpus=0, environment={"RAY_ADDRESS": "10.0.0.1:6379"})
    check_hardware(build("cluster.gpus_per_node=0"), num_gpus=0, environment={})


def test_the_gpu_of_a_reward_model_counts_where_a_dataset_names_it() -> None:
    judge = "{type: reward_model, model_name: rm, resources: {gpus_per_node: 1}}"
    unused = build("cluster.gpus_per_node=2", f"+env.judge={judge}")
    check_hardware(unused, num_gpus=2, environment={})
    used = build("cluster.gpus_per_node=2", f"+env.judge={judge}", "data.default.env_name=judge")
    check_hardware(used, num_gpus=3, environment={})
    with pytest.raises(ConfigError, match=r"3 GPUs wanted \(1 of them for environments.*2 found.*gpus_per_node=1,"):
        check_hardware(used, num_gpus=2, environment={})
    alone = build("cluster.gpus_per_node=1", f"+env.judge={judge}", "data.default.env_name=judge")
    with pytest.raises(ConfigError, match=r"2 GPUs wanted \(1 of them.*1 found.*set fewer for those"):
        check_hardware(alone, num_gpus=1, environment={})


def test_the_shares_of_several_datasets_and_what_an_epoch_is() -> None:
    datasets = "{dataset_name: arithmetic%s}, {dataset_name: lookup, processor: default%s}"
    weighted = f"data.train=[{datasets % (', weight: 3.0', ', weight: 1.0')}]"
    base = ("grpo.num_prompts_per_step=32", "grpo.val_period=0", "checkpointing.metric_name=null")
    [line] = [line for line in lines_of(*base, weighted) if line.startswith("datasets")]
    assert line.startswith("datasets of 32 prompts 24 of arithmetic, 8 of lookup;") and "an epoch is" in line
    [line] = [line for line in lines_of(*base, f"data.train=[{datasets % ('', '')}]") if line.startswith("datasets")]
    assert line == "datasets arithmetic, lookup: put together and shuffled, as many prompts of each as it has rows"
    assert not [line for line in lines_of() if line.startswith("datasets")]


def test_a_replay_starts_no_engine(tmp_path) -> None:
    replay = (f"grpo.replay_from={tmp_path}", "grpo.val_period=0", "grpo.val_at_end=false")
    for apart in (
        (),
        ("cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"),
    ):
        lines = lines_of("cluster.gpus_per_node=1", *replay, *apart, "checkpointing.metric_name=null")
        assert f"generation recorded rollouts from {tmp_path}; no engine starts" in lines
        assert lines[-2:] == ["node GPU policy", "0 0 rank 0"], lines
