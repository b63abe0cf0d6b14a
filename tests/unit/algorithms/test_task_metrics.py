import math
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.setup.rollouts import first_prompts
from nemo_rl.algorithms.trainers.metrics import by_task, rollout_metrics, validation_metrics
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataset
from nemo_rl.types import GroupHandle, SampleStatus
from tests.unit.algorithms.fake_runs import FakeRun
from tests.unit.algorithms.handles import handle, rewarded, sample
from tests.unit.config.run_configs import build

TWO_TASKS = (
    "data.train=[{dataset_name: arithmetic, weight: 3.0}, {dataset_name: arithmetic, env_name: other, weight: 1.0}]",
    "data.validation=[{dataset_name: arithmetic}, {dataset_name: arithmetic, env_name: other}]",
    "+env.other.type=math",
)


def of_task(task: str, group: GroupHandle) -> GroupHandle:
    return replace(group, task_name=task)


def test_each_task_is_told_apart_by_hand():
    groups = [
        of_task("sums", rewarded(1.0, 0.0)),
        of_task("codes", handle(sample(1.0, generated=4, turns=3), sample(0.0, SampleStatus.TRUNCATED, generated=8))),
        of_task("codes", handle(sample(0.0, SampleStatus.FAILED), sample(0.0, SampleStatus.FAILED))),
    ]
    of_rollouts = partial(rollout_metrics, current_weight_version=0)
    metrics = by_task(of_rollouts, groups, ["sums", "codes", "absent"], metric_names.TASK)
    assert {name: value for name, value in metrics.items() if name.startswith("codes/")} == {
        "codes/num_samples": 4.0,
        "codes/reward": 0.5,
        "codes/truncation_rate": 0.5,
        "codes/failed_sample_rate": 0.5,
        "codes/mean_gen_tokens_per_sample": 6.0,
        "codes/avg_turns_per_sample": 2.0,
    }
    assert metrics["sums/reward"] == 0.5
    assert {name for name in metrics if name.startswith("absent/")} == {"absent/num_samples"}
    validated = by_task(partial(validation_metrics, k_values=[1]), groups, ["sums", "codes"])
    assert validated["codes/accuracy"] == 0.5 and validated["sums/pass_at_1"] == 0.5
    assert by_task(of_rollouts, groups, ["sums"]) == {}


def test_a_run_reports_its_tasks_under_names_that_the_configuration_knows(tmp_path):
    config: GRPOMasterConfig = build(
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=2",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "grpo.max_num_steps=2",
        "grpo.val_period=1",
        "checkpointing.enabled=false",
        *TWO_TASKS,
    )
    tasks = ("arithmetic", "arithmetic#2")
    calls: list[str] = []
    run = FakeRun(tmp_path, config, lambda tools, parts: GRPOTrainer(config, tools, parts), calls=calls, tasks=tasks)
    rows: list[dict[str, Any]] = run.go()
    found = {name.removeprefix("train/") for name in rows[0] if name.startswith(tuple(f"train/{t}/" for t in tasks))}
    assert found == config.task_metrics
    assert config.task_metrics <= config.train_metrics
    assert rows[0]["train/arithmetic/reward"] == 0.5
    assert sum(rows[0][f"train/{task}/num_samples"] for task in tasks) == 8
    assert math.isfinite(rows[0]["train/arithmetic#2/mean_gen_tokens_per_sample"])


def test_every_validation_dataset_has_its_part_of_a_short_validation():
    def part(name: str, size: int) -> NamedRows:
        return NamedRows(name=name, task_name=name, rows=[{"problem": str(i)} for i in range(size)])

    data = PromptDataset([part("a", 10), part("b", 2), part("c", 10)])
    assert [prompt.prompt_id for prompt in first_prompts(data, 8)] == [
        *(f"a:{i}" for i in range(3)),
        "b:0",
        "b:1",
        *(f"c:{i}" for i in range(3)),
    ]
    assert len(first_prompts(data, 99)) == 22
    assert first_prompts(None, 3) == []
