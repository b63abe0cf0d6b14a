"""The placement that --dry-run prints, the machines that train and generate, and layouts that are refused."""

import pytest

from nemo_rl.algorithms.setup.hardware import check_hardware
from nemo_rl.algorithms.setup.placement import describe_placement
from nemo_rl.config.errors import ConfigError
from tests.tables import cases, pattern
from tests.unit.config.run_configs import build


def lines_of(*overrides: str) -> list[str]:
    return [" ".join(line.split()) for line in describe_placement(build(*overrides)).splitlines()]


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
    ranks = lines[lines.index("node GPU policy generation") + 1 :]
    assert len(ranks) == 32
    assert ranks[0] == "0 0 rank 0 (stage 0, copy 0, data 0, context 0, tensor 0, experts 0) engine 0"
    assert ranks[13] == "1 5 rank 13 (stage 0, copy 1, data 3, context 0, tensor 1, experts 0) engine 13"
    assert ranks[-1] == "3 7 rank 31 (stage 1, copy 1, data 3, context 1, tensor 1, experts 1) engine 31"


def test_the_gpus_that_are_wanted_and_found_are_named() -> None:
    config = build("cluster.gpus_per_node=4")
    with pytest.raises(ConfigError, match=r"examples/configs/grpo_math_cpu\.yaml"):
        check_hardware(config, num_gpus=0, environment={})
    with pytest.raises(ConfigError, match=r"4 GPUs wanted, 2 found.*cluster.gpus_per_node=2"):
        check_hardware(config, num_gpus=2, environment={})
    check_hardware(config, num_gpus=4, environment={})


def test_the_gpu_of_a_reward_model_counts_where_a_dataset_names_it() -> None:
    two = ("cluster.gpus_per_node=2", "+env.judge={type: reward_model, model_name: rm, resources: {gpus_per_node: 1}}")
    check_hardware(build(*two), num_gpus=2, environment={})
    used = build(*two, "data.default.env_name=judge")
    check_hardware(used, num_gpus=3, environment={})
    with pytest.raises(ConfigError, match=r"3 GPUs wanted \(1 of them for environments.*2 found.*gpus_per_node=1,"):
        check_hardware(used, num_gpus=2, environment={})
    with pytest.raises(ConfigError, match=r"3 GPUs wanted \(1 of them.*1 found.*set fewer for those"):
        check_hardware(used, num_gpus=1, environment={})


def test_a_replay_starts_no_engine(tmp_path) -> None:
    replay = (f"grpo.replay_from={tmp_path}", "grpo.val_period=0", "grpo.val_at_end=false")
    for apart in (
        (),
        ("cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"),
    ):
        lines = lines_of("cluster.gpus_per_node=1", *replay, *apart, "checkpointing.metric_name=null")
        assert f"generation recorded rollouts from {tmp_path}; no engine starts" in lines
        assert lines[-2:] == ["node GPU policy", "0 0 rank 0"], lines


APART = "policy.generation.colocated.enabled=false"
RESOURCES = "policy.generation.colocated.resources"
COLOCATED = "policy.generation.colocated.enabled=true"
CPU = "cluster.gpus_per_node=0"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("cluster.gpus_per_node=8", f"{RESOURCES}.gpus_per_node=6", "policy.train_micro_batch_size=4"), (2, 6)),
        ((CPU, "cluster.cpu_workers_per_node=3", f"{RESOURCES}.cpu_workers_per_node=1"), (2, 1)),
        (("cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{RESOURCES}.num_nodes=2"), (16, 16)),
        (("cluster.gpus_per_node=2", "cluster.num_nodes=5", f"{RESOURCES}={{num_nodes: 1, gpus_per_node: 2}}"), (8, 2)),
        ((CPU, "cluster.cpu_workers_per_node=2", "cluster.num_nodes=2", f"{RESOURCES}.num_nodes=1"), (2, 2)),
        (("cluster.gpus_per_node=4", "cluster.num_nodes=2", COLOCATED), (8, 8)),
    ],
)
def test_one_node_is_divided_and_several_are_shared_out_whole(overrides, expected) -> None:
    config = build(APART, "cluster.worker_timeout_s=77", *overrides)
    assert (config.training_cluster.num_workers, config.generation_cluster.num_workers) == expected
    assert config.training_cluster.worker_timeout_s == config.generation_cluster.worker_timeout_s == 77


def megatron_lines(model: str, *layout: str) -> list[str]:
    megatron = ("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false", "cluster.gpus_per_node=8")
    return lines_of(f"policy.model_name={model}", *megatron, *(f"policy.megatron_cfg.{key}" for key in layout))


MEGATRON = """
tiny:arithmetic & pipeline_model_parallel_size=4 -> pipeline_model_parallel_size=4: the model has 2 layers
tiny:arithmetic & tensor_model_parallel_size=8 -> tensor_model_parallel_size=8 does not divide the 4
tiny:arithmetic & expert_model_parallel_size=2 -> is a dense model and has no experts
tiny:arithmetic-moe & expert_model_parallel_size=8 -> expert_model_parallel_size=8 does not divide the 4
tiny:arithmetik -> did you mean tiny:arithmetic
"""


@pytest.mark.parametrize(("model_and_layout", "message"), cases(MEGATRON))
def test_a_layout_that_the_model_does_not_have_is_refused(model_and_layout: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=pattern(message)):
        megatron_lines(*model_and_layout)


@pytest.mark.parametrize("model", ["nobody/has-this-model", "/on/another/machine"])
def test_a_model_that_is_not_here_is_said_not_to_be_checked(model: str) -> None:
    lines = megatron_lines(model, "pipeline_model_parallel_size=4")
    assert "model not checked against the layout: its config.json is not on this machine" in lines
