"""What a rollout worker is given: how to tokenise, decode, answer and bound an episode. Everything here pickles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure, EnvironmentPool, EnvironmentStep
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import EpisodeFailure, RolloutWorkerSettings
from nemo_rl.types import Sample, SampleStatus, SamplingParams

logger = logging.getLogger(__name__)


def rollout_settings(
    config: RolloutMasterConfig,
    tokenizer: PreTrainedTokenizerFast,
    data: DataSetup,
    environments: Mapping[str, Sequence[Any]],
) -> RolloutWorkerSettings:
    """`environments`: section of `env` -> actor handles."""
    return worker_settings(
        PromptProcessor(data.tasks, tokenizer, config.data.max_input_seq_length),
        environments,
        limits=EpisodeLimits(
            max_turns=config.rollout.max_rollout_turns,
            max_total_tokens=config.policy.generation.vllm_cfg.max_model_len,
            timeout_s=config.rollout.episode_timeout_s,
        ),
        env_step_timeout_s=config.rollout.env_step_timeout_s,
        worker_timeout_s=config.cluster.worker_timeout_s,
        seed=config.rollout.seed,
    )


def worker_settings(
    process: PromptProcessor,
    environments: Mapping[str, Sequence[Any]],
    *,
    limits: EpisodeLimits,
    env_step_timeout_s: float,
    worker_timeout_s: float,
    seed: int,
) -> RolloutWorkerSettings:
    """`environments`: section of `env` -> actor handles."""
    task_to_env = {name: task.env_name for name, task in process.tasks.items()}
    return RolloutWorkerSettings(
        process=process,
        decode=partial(decode, process.tokenizer),
        render=ObservationRenderer(process.tokenizer),
        connect_environments=partial(connect_environments, environments, task_to_env, env_step_timeout_s),
        limits=limits,
        run_seed=seed,
        engine_timeout_s=worker_timeout_s / 2,  # before whoever waits for the rollout worker takes that for stuck
    )


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of sampled tokens, without end-of-sequence and other special tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def connect_environments(
    actors: Mapping[str, Sequence[Any]], task_to_env: Mapping[str, str], step_timeout_s: float
) -> dict[str, EpisodeEnvironment]:
    """By task name. One pool per environment, so that all its episodes share batches."""
    environments = {
        name: EpisodeEnvironment(EnvironmentPool(name, handles, step_timeout_s)) for name, handles in actors.items()
    }
    return {task: environments[name] for task, name in task_to_env.items()}


class EpisodeEnvironment:
    """An environment for episodes: its failure is a failure of the episode."""

    def __init__(self, client: EnvironmentPool) -> None:
        self.client = client
        self.name = client.name

    async def step(self, message_log: list[dict[str, str]], metadata: Any, *, sample_id: str) -> EnvironmentStep:
        try:
            return await self.client.step(message_log, metadata, sample_id=sample_id)
        except EnvironmentFailure as failure:
            raise EpisodeFailure(str(failure)) from failure

    async def metrics(self, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
        """What `global_post_process_and_metrics` says of finished samples; nothing, with a warning, when it fails."""
        try:
            return await self.client.metrics(finished_batch(samples))
        except EnvironmentFailure as failure:  # training needs no metrics
            logger.warning("%s", failure)
            return {}


def finished_batch(samples: Sequence[tuple[str, Sample]]) -> BatchedDataDict[Any]:
    """Finished samples as environments expect them in `global_post_process_and_metrics`; tensors are [B]."""
    metas = [sample.meta for _, sample in samples]
    return BatchedDataDict(
        {
            "group_id": [group_id for group_id, _ in samples],
            "text": [sample.messages[0]["content"] for _, sample in samples],
            "message_log": [sample.messages for _, sample in samples],
            "metrics": [sample.metrics for _, sample in samples],
            "rewards": torch.tensor([meta.reward for meta in metas]),
            "is_end": torch.tensor([meta.status is SampleStatus.COMPLETED for meta in metas]),
            "prompt_lengths": torch.tensor([meta.num_prompt_tokens for meta in metas]),
            "generation_lengths": torch.tensor([meta.num_generated_tokens for meta in metas]),
        }
    )


def sampling_params(
    config: RolloutMasterConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[SamplingParams, SamplingParams]:
    """Sampling in training and in validation. Without `stop_token_ids`, the end-of-sequence token stops."""
    generation = config.policy.generation
    train = train_sampling(generation, tokenizer)
    val = replace(train, temperature=generation.val_temperature, top_p=generation.val_top_p, top_k=generation.val_top_k)
    return train, val


def train_sampling(generation: GenerationConfig, tokenizer: PreTrainedTokenizerFast) -> SamplingParams:
    """Sampling as `temperature`, `top_p` and `top_k` of `generation` say."""
    end: Any = tokenizer.eos_token_id  # a number, for a single token
    stops = generation.stop_token_ids if generation.stop_token_ids is not None else [end]
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=tuple(stops),
        stop_strings=tuple(generation.stop_strings or ()),
    )
