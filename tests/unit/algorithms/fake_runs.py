"""Runs of trainers that sample, with fakes in place of workers."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.config.loader import dump_config
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import SamplingParams
from tests.fakes import FakePolicy, FakeRefit, FakeRollouts, run_tools
from tests.functional.cli import keys
from tests.unit.config.run_configs import build

FLOPS = ModelFlops(
    per_token=1e6, per_pair=1e3, windows=(None,), num_parameters=500_000, expert_parameters=0, cache_size=64
)


def alternate(request: GroupRequest, index: int) -> float:
    """Rewards 0 and 1 by turns."""
    return float(index % 2)


class FakeRun:
    """Parts and tools of a run in a folder; `make(tools, parts)` makes the trainer.

    Every task of `tasks` has a dataset of eight prompts with its name. The calls of all policies are in `calls`.
    """

    def __init__(
        self,
        folder: Path,
        config: RolloutMasterConfig,
        make: Callable[[RunTools, RolloutParts], RolloutTrainer],
        *,
        calls: list[str] | None = None,
        reward: Any = alternate,
        rollouts: Any = None,
        policy: FakePolicy | None = None,
        tasks: Sequence[str] = ("t",),
        identity: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        calls = [] if calls is None else calls
        self.folder = folder / "run"
        self.policy = policy or FakePolicy()
        self.policy.calls, self.policy.config = calls, config.policy
        self.rollouts = rollouts or FakeRollouts(reward, calls)
        rows = [{"problem": str(i)} for i in range(8)]
        data = PromptDataset([NamedRows(name=task, task_name=task, rows=rows) for task in tasks])
        tools, self.text = run_tools(folder, config.checkpointing, config=dump_config(config), **identity)
        self.refit = FakeRefit(calls, self.rollouts)
        self.generation = SimpleNamespace(abandon_requests=None, dead_workers=lambda: [])
        fakes: Any = {"policy": self.policy, "generation": self.generation, "refit": self.refit}
        fakes["rollouts"] = self.rollouts
        fakes |= dict.fromkeys(("train_sampling", "val_sampling"), SamplingParams(max_new_tokens=8))
        prompts = PromptDataLoader(data, config.rollout.num_prompts_per_step, seed=1)
        parts = RolloutParts(**fakes, prompts=prompts, validation_prompts=[data[0], data[1]], flops=FLOPS)
        self.trainer = make(tools, parts)

    def go(self) -> list[dict[str, Any]]:
        self.trainer.start()
        self.trainer.train()
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def small(folder: Path, section: str) -> tuple[str, ...]:
    """Overrides: three steps of 2 x 2 samples, saved in `folder`."""
    loop = {section: "num_prompts_per_step=2 num_generations_per_prompt=2 val_period=0 max_num_steps=3"}
    saving = f"metric_name=null save_period=2 checkpoint_dir={folder / 'ckpt'}"
    return keys(**loop, policy="train_global_batch_size=4 train_micro_batch_size=2", checkpointing=saving)


class GRPORun(FakeRun):
    def __init__(self, folder: Path, *overrides: str, trainer: Any = GRPOTrainer, **options: Any) -> None:
        config = build(*small(folder, "grpo"), *overrides)
        super().__init__(folder, config, partial(trainer, config), **options)
