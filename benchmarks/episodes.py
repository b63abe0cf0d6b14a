"""The overhead of a multi-turn episode, with an engine and an environment that answer immediately.

    uv run --extra cpu python -m benchmarks.episodes

Collector, rollout worker, engine and environment are processes as in a run. Conversations use the chat template and
the tokenizer of a tiny model. Prints milliseconds per turn: wall-clock time, and CPU time of the controller and of the
rollout worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_rl.algorithms.parts.worker_settings import worker_settings
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import math_hf_data_processor
from nemo_rl.data.rows.setup import PromptProcessor, Task
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.environments.config import MathEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.models.generation.config import VllmConfig
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import GroupRequest, RolloutWorkerSettings
from nemo_rl.types import (
    Completion,
    GenerationAnswer,
    GenerationRequest,
    GroupHandle,
    Prompt,
    SamplingParams,
    StopReason,
)

GENERATIONS = 8  # of each prompt
PROMPT = "p" * 256
ANSWER_TOKENS = 50
OBSERVATION = "o" * 50


class InstantEngine:
    """A generation worker that answers immediately."""

    def __init__(self, end: int) -> None:
        self.completion = Completion(
            token_ids=[40] * (ANSWER_TOKENS - 1) + [end],
            logprobs=[-0.1] * ANSWER_TOKENS,
            stop_reason=StopReason.STOP,
            weight_version=0,
        )
        self.answers: list[GenerationAnswer] = []
        self.has_answers = asyncio.Event()

    async def submit(self, requests: Sequence[GenerationRequest], client_id: str) -> None:
        self.answers += [GenerationAnswer(request_id=r.request_id, completion=self.completion) for r in requests]
        self.has_answers.set()

    async def drain(self, client_id: str) -> list[GenerationAnswer]:
        await self.has_answers.wait()
        self.has_answers.clear()
        answers, self.answers = self.answers, []
        return answers


class InstantEnvironment(EnvironmentInterface[Any]):
    """Gives every turn the same answer."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": OBSERVATION}] * size,
            metadata=metadata,
            next_stop_strings=[None] * size,
            rewards=torch.ones(size),
            terminateds=torch.zeros(size),
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        return batch, {}


def settings(environment: Any, turns: int) -> RolloutWorkerSettings:
    task = Task(spec=TaskDataSpec("t"), processor=math_hf_data_processor, env_name="e")
    return worker_settings(
        PromptProcessor({"t": task}, build_tiny_tokenizer(), 4096),
        environments={"e": [environment]},
        env={"e": MathEnvironmentConfig()},  # not read: the environment is there already
        limits=EpisodeLimits(max_turns=turns, max_total_tokens=100_000),
        env_step_timeout_s=60,
        worker_timeout_s=600,
        seed=0,
        model_name="",
        vocab_size=0,
        vllm=VllmConfig(precision="float32", max_model_len=4096),
    )


def request(number: int) -> GroupRequest:
    prompt = Prompt(prompt_id=f"t:{number}", row={"problem": PROMPT, "expected_answer": ""}, idx=number, task_name="t")
    return GroupRequest(
        group_id=f"0/{number}/t:{number}",
        prompt=prompt,
        num_generations=GENERATIONS,
        sampling=SamplingParams(max_new_tokens=100),
        seed_step=0,
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_episodes: int, turns: int) -> dict[str, float]:
    """Milliseconds for each turn."""
    init_ray()
    with ExitStack() as stack:
        cluster = stack.enter_context(RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=3))
        builder = RayWorkerBuilder("benchmarks.episodes.InstantEngine", build_tiny_tokenizer().eos_token_id)
        engines = stack.enter_context(RayWorkerGroup(cluster, builder, name_prefix="engine", num_workers=1))
        environment = ray.remote(InstantEnvironment).options(num_cpus=0).remote()
        accelerator = Accelerator(exclusive=False)
        accelerator.register(GENERATION, lambda: None, lambda: None)
        collector = RolloutCollector(cluster, settings(environment, turns), engines.workers, accelerator, timeout_s=600)
        stack.callback(collector.shutdown)
        collector.collect([request(-1)])
        identity = collector.group.members[0].identity
        assert identity is not None
        pids = {"controller": os.getpid(), "rollout worker": identity.pid}
        before, begin = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.perf_counter()
        groups: list[GroupHandle] = collector.collect([request(n) for n in range(num_episodes // GENERATIONS)])
        wall_s = time.perf_counter() - begin
        used = {f"cpu of the {name}": cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == num_episodes and all(sample.num_turns == turns for sample in samples)
    num_turns = num_episodes * turns
    return {name: 1000 * seconds / num_turns for name, seconds in {"clock": wall_s, **used}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    for name, milliseconds in measure(args.episodes, args.turns).items():
        print(f"{name:24} {milliseconds:6.3f} ms per turn")


if __name__ == "__main__":
    main()
