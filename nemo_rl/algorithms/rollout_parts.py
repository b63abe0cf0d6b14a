"""What a rollout worker is given: how to tokenise, decode, answer and bound an episode. Everything here pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.data.messages import ObservationRenderer
from nemo_rl.data.processing import PromptProcessor
from nemo_rl.data.setup import DataSetup
from nemo_rl.environments.client import EnvironmentClient, EnvironmentFailure, EnvironmentStep
from nemo_rl.rollouts.collector import EpisodeFailure, RolloutWorkerSettings
from nemo_rl.rollouts.episode import EnvStepFn, EpisodeLimits
from nemo_rl.types import SamplingParams


def rollout_settings(
    config: GRPOMasterConfig, tokenizer: PreTrainedTokenizerFast, data: DataSetup, environments: Mapping[str, Any]
) -> RolloutWorkerSettings:
    """`environments`: section of `env` -> actor handle."""
    return RolloutWorkerSettings(
        process=PromptProcessor(data.tasks, tokenizer, config.data.max_input_seq_length),
        decode=partial(decode, tokenizer),
        render=ObservationRenderer(tokenizer),
        connect_environments=partial(
            connect_environments, environments, data.task_to_env, config.grpo.env_step_timeout_s
        ),
        limits=EpisodeLimits(
            max_turns=config.grpo.max_rollout_turns,
            max_total_tokens=config.policy.generation.vllm_cfg.max_model_len,
        ),
        run_seed=config.grpo.seed,
    )


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """The text of sampled tokens, without end-of-sequence and other special tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def connect_environments(
    actors: Mapping[str, Any], task_to_env: Mapping[str, str], step_timeout_s: float
) -> dict[str, EnvStepFn]:
    """Task name -> step. One client per environment, so that all its episodes share batches."""
    clients = {name: EnvironmentClient(name, actor, step_timeout_s) for name, actor in actors.items()}
    return {task: partial(environment_step, clients[name]) for task, name in task_to_env.items()}


async def environment_step(
    client: EnvironmentClient, message_log: list[dict[str, str]], metadata: Any
) -> EnvironmentStep:
    """One step; a failure of the environment is a failure of the episode."""
    try:
        return await client.step(message_log, metadata)
    except EnvironmentFailure as failure:
        raise EpisodeFailure(str(failure)) from failure


def sampling_params(
    config: GRPOMasterConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[SamplingParams, SamplingParams]:
    """Sampling in training and in validation. Without `stop_token_ids`, the end-of-sequence token stops."""
    generation = config.policy.generation
    stops = generation.stop_token_ids if generation.stop_token_ids is not None else [tokenizer.eos_token_id]
    common: dict[str, Any] = {
        "max_new_tokens": generation.max_new_tokens,
        "stop_token_ids": tuple(stops),
        "stop_strings": tuple(generation.stop_strings or ()),
    }
    train = SamplingParams(temperature=generation.temperature, top_p=generation.top_p, top_k=generation.top_k, **common)
    val = SamplingParams(
        temperature=generation.val_temperature, top_p=generation.val_top_p, top_k=generation.val_top_k, **common
    )
    return train, val
