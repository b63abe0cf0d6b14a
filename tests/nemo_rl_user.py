"""Environments and a loss as somebody wrote them for NeMo RL v0.6 or its main; here they run as they are."""

import re
from typing import Any, Optional, TypedDict

import ray
import torch
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt
from nemo_rl.environments.utils import chunk_list_to_workers

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class SumConfig(TypedDict):
    num_workers: int
    stop_strings: Optional[list[str]]  # noqa: UP045
    device: str


class SumMetadata(TypedDict):
    ground_truth: str


@ray.remote(max_restarts=-1, max_task_retries=-1)
class SumEnv(EnvironmentInterface[SumMetadata]):
    """One turn; everything that NeMo RL's own environments read of a batch."""

    DEFAULT_PY_EXECUTABLE = PY_EXECUTABLES.SYSTEM

    def __init__(self, cfg: SumConfig):
        self.num_workers = cfg["num_workers"]
        assert cfg["stop_strings"] is None and cfg["device"] == "cuda:0", "keys of its own, whatever they are called"

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[SumMetadata]) -> EnvironmentReturn:
        answers = ["".join(m["content"] for m in log if m["role"] == "assistant") for log in message_log_batch]
        right = []
        for part in chunk_list_to_workers(list(zip(answers, metadata, strict=True)), self.num_workers):
            right += [float(known["ground_truth"] in answer) for answer, known in part]
        observations = [{"role": "environment", "content": f"Environment: {score}"} for score in right]
        terminateds = torch.ones(len(right)).cpu()
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[None] * len(right),
            rewards=torch.tensor(right).cpu(),
            terminateds=terminateds,
            answers=None,
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        batch["rewards"] = batch["rewards"] * batch["is_end"]
        solved = batch["rewards"] == 1
        lengths = batch["generation_lengths"] - batch["prompt_lengths"]
        return batch, {
            "accuracy": batch["rewards"].mean().item(),
            "pass@samples_per_prompt": calculate_pass_rate_per_prompt(batch["text"], batch["rewards"]),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_problems_in_batch": batch["is_end"].shape[0],
            "generation_lengths": batch["generation_lengths"].float().mean(),  # a tensor, as people forget it
            "prompt_lengths": batch["prompt_lengths"].float().mean().item(),
            "correct_solution_generation_lengths": lengths[solved].float().mean().item(),
            "total_reward": batch["total_reward"].sum().item(),
            "last_row": max(batch["idx"]),
            "turns": sum(len(log) for log in batch["message_log"]) / len(batch["message_log"]),
        }


class GuessMetadata(TypedDict):
    secret: int
    num_turns: int


@ray.remote
class GuessEnv(EnvironmentInterface[Optional[GuessMetadata]]):  # noqa: UP045
    """Several turns; it reads the rendered prompt, and writes marks of the template into its observations.

    It returns no metadata where nothing changes, and no stop strings at all.
    """

    def __init__(self, cfg: Optional[dict[str, Any]] = None):  # noqa: UP045
        self.cfg = cfg or {}

    def step(
        self,
        message_log_batch: list[LLMMessageLogType],
        metadata: list[Optional[GuessMetadata]],  # noqa: UP045
    ) -> EnvironmentReturn:
        observations, rewards, ends = [], [], []
        for log, known in zip(message_log_batch, metadata, strict=True):
            assert known is not None, "metadata of None keep those of the turn before"
            assert log[0]["content"].startswith(self.cfg["prompt_start"]), log[0]["content"]
            numbers = re.findall(r"\d+", log[-1]["content"])
            right = numbers[-1:] == [str(known["secret"])]
            text = "right" if right else "<|user|>another number<eos><|assistant|>"
            observations.append({"role": "environment", "content": text})
            rewards.append(1.0 if right else -0.25)
            ends.append(right)
        return EnvironmentReturn(
            observations, [None] * len(ends), None, torch.tensor(rewards), torch.tensor(ends), None
        )  # fmt: skip

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {"guesses": sum(m["role"] == "assistant" for log in batch["message_log"] for m in log)}


class PartsEnv(EnvironmentInterface):
    """Several rewards: as a matrix, correctness first (v0.6), or by name (main)."""

    def __init__(self, cfg: dict[str, Any]):
        self.by_name = cfg["by_name"]

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[dict]) -> EnvironmentReturn:
        texts = [log[-1]["content"] for log in message_log_batch]
        right = torch.tensor([float(text.isdecimal()) for text in texts])
        short = torch.tensor([0.5 * (len(text) < 3) for text in texts])
        rewards = {"short": short, "right": right} if self.by_name else torch.stack([right, short], dim=1)
        none = [None] * len(texts)
        observations = [{"role": "environment", "content": ""}] * len(texts)
        return EnvironmentReturn(observations, metadata, none, rewards, torch.ones(len(texts)), none)

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {"accuracy": (batch["rewards"][:, 0] == 1).float().mean().item()}


class OldMetricsEnv(SumEnv.__ray_metadata__.modified_class):
    """Reads a field that no batch has."""

    def global_post_process_and_metrics(self, batch):
        return batch, {"difficulty": batch["difficulty"].mean().item()}
