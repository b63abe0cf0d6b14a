"""GRPO with simulated engines and policy, which only take time, and the real trainer, collector and rollout worker.

For the benchmarks of schedules. An engine answers any number of requests at once, each after seconds drawn by its seed.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.grpo import GRPOTrainer
from nemo_rl.algorithms.loop import RunTools
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts
from nemo_rl.config.loader import load_config
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.models.policy.flops import ModelFlops
from nemo_rl.report.recorder import RunRecorder
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import RolloutWorkerSettings
from nemo_rl.types import (
    BatchPlan,
    Completion,
    DatumSpec,
    EnvironmentStep,
    GenerationAnswer,
    GenerationRequest,
    Prompt,
    SamplingParams,
    StopReason,
    TrainResult,
)
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.timer import TimeoutChecker

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "configs" / "grpo_math_cpu.yaml"
OVERRIDES = (
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
    "logger.num_val_samples_to_print=0",
    "loss_fn.use_importance_sampling_correction=true",
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a simulated step: of its training, and of its slowest sample unless that is a straggler."""

    training_s: float
    generation_s: float
    straggler_factor: float = 1.0  # of one sample of each group


class SimulatedEngine:
    """A generation worker with `submit` and `drain`."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.answers: asyncio.Queue[GenerationAnswer] = asyncio.Queue()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.seen: set[int] = set()  # prompts whose straggler has come

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str) -> None:
        for request in requests:
            self.tasks[request.request_id] = asyncio.create_task(self.answer(request))

    async def answer(self, request: GenerationRequest) -> None:
        seconds = self.times.generation_s * random.Random(request.seed).uniform(0.5, 1.0)
        if request.prompt_token_ids[0] not in self.seen:
            self.seen.add(request.prompt_token_ids[0])
            seconds *= self.times.straggler_factor
        await asyncio.sleep(seconds)
        completion = Completion(token_ids=[7], logprobs=[-0.1], stop_reason=StopReason.STOP, weight_version=0)
        del self.tasks[request.request_id]
        await self.answers.put(GenerationAnswer(request_id=request.request_id, completion=completion))

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self.tasks:
                self.tasks.pop(request_id).cancel()

    async def drain(self, client_id: str) -> list[GenerationAnswer]:
        found = [await self.answers.get()]
        while not self.answers.empty():
            found.append(self.answers.get_nowait())
        return found


class SimulatedTrainer:
    """A policy worker."""

    def __init__(self, times: Times) -> None:
        self.times = times

    def train(self) -> None:
        time.sleep(self.times.training_s)


class SimulatedPolicy:
    """The methods of a policy that a step calls."""

    data_parallel_size, controller_tensor_bytes, gpu, name_prefix = 1, 0, None, "policy"

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group = group

    def while_waiting(self, callback: Callable[[], None]) -> None:
        self.group.on_wait = callback

    def load(self, plan: BatchPlan) -> None:
        pass

    def restart(self) -> None:
        raise AssertionError("nothing dies here")

    def keep_samples(self, folder: Path, max_tokens: int) -> None:
        pass

    def write_samples(self, step: int) -> None:
        pass

    def samples_written(self) -> list[str]:
        return []

    def train(self, loss_fn: Any, task: Any, is_last_pass: bool = True) -> TrainResult:
        self.group.call_all(SimulatedTrainer.train)
        metrics = {"loss": 0.0, "global_valid_toks": 1.0}
        return TrainResult(losses=[0.0], grad_norms=[0.0], learning_rates=[0.0], metrics=metrics)


class SimulatedRefit:
    """A weight sync that takes no time."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def announce(self) -> None:
        pass

    def sync(self, version: int) -> dict[str, float]:
        self.notify()
        return {}


class Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


class Referee:
    """An environment in the rollout worker's own process."""

    name = "referee"

    async def step(self, message_log: Any, metadata: Any, **names: Any) -> EnvironmentStep:
        return EnvironmentStep(
            observation={"role": "environment", "content": ""},
            reward=float(random.random() < 0.5),
            terminated=True,
            metadata=None,
            next_stop_strings=None,
        )

    async def metrics(self, samples: Any) -> dict[str, float]:
        return {}


def process(prompt: Prompt) -> DatumSpec:
    message = {"role": "user", "content": "?", "token_ids": torch.tensor([prompt.idx, 0])}
    return DatumSpec(message_log=[message], length=2, extra_env_info=None, loss_multiplier=1.0, idx=prompt.idx)


def decode(token_ids: Sequence[int]) -> str:
    return ""


def render(observation: Mapping[str, str], **how: Any) -> list[int]:
    return []


def referees() -> dict[str, Any]:
    return {"t": Referee()}


def steps_per_hour(folder: Path, times: Times, overrides: Sequence[str]) -> float:
    """Run a simulated GRPO and return its steps per hour, the first two left out."""
    seconds = [row["timing/train/total_step_time"] for row in simulate(folder, times, overrides)[2:]]
    return 3600 * len(seconds) / sum(seconds)


def simulate(
    folder: Path, times: Times, overrides: Sequence[str], *, each_step: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Run a simulated GRPO with a report. Returns the rows of its metrics.jsonl. Calls `each_step` at every refit."""
    config = load_config(GRPOMasterConfig, CONFIG, [*OVERRIDES, *overrides])
    with ExitStack() as stack:
        cluster = stack.enter_context(RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4))
        trainer = _build(config, folder, times, cluster, stack, SimulatedRefit(each_step))
        assert trainer.tools.recorder is not None
        trainer.tools.recorder.open({})
        trainer.tools.recorder.start(config.grpo.max_num_steps, trainer.policies[0])
        trainer.start()
        trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _build(
    config: GRPOMasterConfig,
    folder: Path,
    times: Times,
    cluster: RayVirtualCluster,
    stack: ExitStack,
    refit: SimulatedRefit,
) -> GRPOTrainer:
    def group(worker: str, name: str) -> RayWorkerGroup:
        builder = RayWorkerBuilder(f"benchmarks.simulated_run.{worker}", times)
        return stack.enter_context(RayWorkerGroup(cluster, builder, name_prefix=name, num_workers=1))

    engines, policy = group("SimulatedEngine", "engine"), group("SimulatedTrainer", "policy")
    accelerator = Accelerator(exclusive=False)
    accelerator.register(GENERATION, lambda: None, lambda: None)
    settings = RolloutWorkerSettings(
        process=process,
        survives_text=bool,
        decode=decode,
        render=render,
        connect_environments=referees,
        limits=EpisodeLimits(max_turns=1, max_total_tokens=64, timeout_s=config.grpo.episode_timeout_s),
        run_seed=1,
    )
    rollouts = RolloutCollector(cluster, settings, engines.workers, accelerator, timeout_s=60)
    stack.callback(rollouts.shutdown)
    rows = [{"problem": str(i)} for i in range(1000)]
    data = PromptDataset([NamedRows(name="t", task_name="t", rows=rows)])
    sampling = SamplingParams(max_new_tokens=8)
    parts: Any = RolloutParts(
        policy=SimulatedPolicy(policy),  # type: ignore[arg-type]
        generation=None,  # type: ignore[arg-type]
        refit=refit,  # type: ignore[arg-type]
        rollouts=rollouts,
        prompts=PromptDataLoader(data, config.grpo.num_prompts_per_step, seed=1),
        validation_prompts=[],
        train_sampling=sampling,
        val_sampling=sampling,
        flops=ModelFlops(per_token=1.0, per_pair=0.0, windows=(), num_parameters=0, expert_parameters=0, cache_size=0),
    )
    # Not a StringIO, which would grow.
    console = RunConsole(num_steps=config.grpo.max_num_steps, file=Nowhere(), force_terminal=False)
    tools = RunTools(
        logger=Logger(config.logger, folder),
        console=console,
        checkpointing=config.checkpointing,
        checkpointer=None,
        deadline=TimeoutChecker(None),
        resolved_config_yaml="",
        identity={},
        recorder=RunRecorder(config.logger.report, folder, console),
    )
    return GRPOTrainer(config, tools, parts)
