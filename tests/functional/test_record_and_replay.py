"""A recorded run, trained again from its record without engines."""

import shutil
from typing import Any

import pytest

from nemo_rl.rollouts.records import read_index, recorded_steps
from tests.functional.cli import ROOT, SMALL, run

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ASYNC = (
    "cluster.cpu_workers_per_node=2",
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "grpo.async_grpo.group_order=arrival",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "loss_fn.use_importance_sampling_correction=true",
)
REPLAY = (
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
    "checkpointing.checkpoint_dir=replayed",
)
NOT_REPLAYED = ("train/buffer_size",)


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What training made of each step, to the last bit."""
    return [{k: v for k, v in row.items() if k.startswith("train/") and k not in NOT_REPLAYED} for row in rows]


def test_experts_of_generation_are_taken_recorded_and_replayed_bit_for_bit(tmp_path):
    record = tmp_path / "record"
    moe = (
        *SMALL,
        "grpo.max_num_steps=2",
        "grpo.val_period=0",
        "grpo.val_at_end=false",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
        "policy.model_name=tiny:arithmetic-moe",
        "policy.router_replay.enabled=true",
        "policy.megatron_cfg.freeze_moe_router=false",
    )
    config = ROOT / "examples" / "configs" / "grpo_math_megatron_cpu.yaml"
    keys = ("grpo.rollout_record.enabled=true", f"grpo.rollout_record.save_dir={record}")
    recorded = run(tmp_path / "recorded", *moe, *keys, config=config)
    assert recorded.status == 0, recorded.output[-4000:]
    first = recorded.metrics[0]
    num_tokens = first["train/total_num_tokens"]
    num_samples = num_tokens / first["train/mean_total_tokens_per_sample"]
    assert first["train/moe/replayed_fraction"] == pytest.approx(1 - num_samples / num_tokens), "all but the last ones"
    assert first["train/moe/replay_agreement"] > 0.99
    assert first["performance/routed_experts_bytes"] == (num_tokens - num_samples) * 2 * 2, "2 layers, 2 experts each"
    replayed = run(tmp_path / "replayed", *moe, f"grpo.replay_from={record}", config=config)
    assert replayed.status == 0, replayed.output[-4000:]
    assert trained(replayed.metrics) == trained(recorded.metrics)


def test_an_asynchronous_run_is_replayed_bit_for_bit(tmp_path):
    """In-flight updates and order of arrival: the record alone knows what was trained when."""
    record = tmp_path / "record"
    keys = ("grpo.rollout_record.enabled=true", f"grpo.rollout_record.save_dir={record}")
    recorded = run(tmp_path / "recorded", *SMALL, *ASYNC, *keys, "grpo.val_period=0", "checkpointing.metric_name=null")
    assert recorded.status == 0, recorded.output[-4000:]
    assert recorded_steps(record) == [1, 2, 3, 4] and "4 steps of rollouts" in recorded.output
    replayed = run(tmp_path / "replayed", *SMALL, *ASYNC, *REPLAY, f"grpo.replay_from={record}", "grpo.max_num_steps=9")
    assert replayed.status == 0, replayed.output[-4000:]
    assert f"the record in {record} ends with step 4" in replayed.output and "vllm" not in replayed.output.lower()
    want, got = trained(recorded.metrics), trained(replayed.metrics)
    assert len(want) == 4 and all(row["train/grad_norm"] > 0 for row in want)
    assert got[:4] == want
    assert max(row["train/weight_version_lag/max"] for row in want) >= 1
    assert read_index(record, 3).weight_version == 2

    refused = run(
        tmp_path / "refused",
        *SMALL,
        *REPLAY,
        f"grpo.replay_from={record}",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=32",
    )
    assert refused.status == 2 and "rollouts.num_generations_per_prompt" in refused.output, refused.output[-2000:]
    shutil.rmtree(record / "step_000002")
    gap = run(tmp_path / "gap", *SMALL, *REPLAY, f"grpo.replay_from={record}")
    assert gap.status == 2 and "holds steps 1, 3 to 4" in gap.output, gap.output[-2000:]
