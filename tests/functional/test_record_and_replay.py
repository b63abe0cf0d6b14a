"""A recorded run, trained again from its record without engines."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.rollouts.records import read_index, recorded_steps
from tests.functional.cli import BARE, CONFIGS, SMALL, run

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NOT_REPLAYED = ("train/buffer_size",)


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training metrics of each step, which must agree to the last bit."""
    return [{k: v for k, v in row.items() if k.startswith("train/") and k not in NOT_REPLAYED} for row in rows]


def recording(folder: Path) -> str:
    return f"grpo.rollout_record={{enabled: true, save_dir: {folder}}}"


def test_experts_of_generation_are_taken_recorded_and_replayed_bit_for_bit(tmp_path):
    record = tmp_path / "record"
    moe = (
        *SMALL,
        *BARE,
        "grpo.max_num_steps=2",
        "checkpointing.metric_name=null",
        "policy.model_name=tiny:arithmetic-moe",
        "policy.router_replay.enabled=true",
        "policy.megatron_cfg.freeze_moe_router=false",
    )
    config = CONFIGS / "grpo_math_megatron_cpu.yaml"
    recorded = run(tmp_path / "recorded", *moe, recording(record), config=config).steps
    first = recorded[0]
    num_tokens = first["train/total_num_tokens"]
    num_samples = num_tokens / first["train/mean_total_tokens_per_sample"]
    assert first["train/moe/replayed_fraction"] == pytest.approx(1 - num_samples / num_tokens), "all but the last ones"
    assert first["train/moe/replay_agreement"] > 0.99
    assert first["performance/routed_experts_bytes"] == (num_tokens - num_samples) * 2 * 2, "2 layers, 2 experts each"
    replayed = run(tmp_path / "replayed", *moe, f"grpo.replay_from={record}", config=config).steps
    assert trained(replayed) == trained(recorded)


def test_an_asynchronous_run_is_replayed_bit_for_bit(tmp_path):
    """In-flight updates and order of arrival: the record alone knows what was trained when."""
    record = tmp_path / "record"
    keys = (*SMALL, *BARE, "grpo.async_grpo.group_order=arrival", "checkpointing.metric_name=null")
    config = CONFIGS / "grpo_math_async_cpu.yaml"
    recorded = run(tmp_path / "recorded", *keys, recording(record), config=config)
    want = trained(recorded.steps)
    assert recorded_steps(record) == [1, 2, 3, 4] and "4 steps of rollouts" in recorded.output
    again = (*keys, f"grpo.replay_from={record}")
    replayed = run(tmp_path / "replayed", *again, "grpo.max_num_steps=9", config=config)
    assert trained(replayed.steps)[:4] == want
    assert f"the record in {record} ends with step 4" in replayed.output and "vllm" not in replayed.output.lower()
    assert len(want) == 4 and all(row["train/grad_norm"] > 0 for row in want)
    assert max(row["train/weight_version_lag/max"] for row in want) >= 1
    assert read_index(record, 3).weight_version == 2

    more = ("grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=32")
    refused = run(tmp_path / "refused", *again, *more, config=config)
    assert refused.status == 2 and "rollouts.num_generations_per_prompt" in refused.output, refused.output[-2000:]
