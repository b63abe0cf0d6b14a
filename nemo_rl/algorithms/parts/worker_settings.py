"""The settings of a rollout worker: how it tokenises, decodes, answers and bounds an episode.

All of this is pickled. The worker's process imports this module, and none of the modules that start a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from nemo_rl.data.chat.images import open_images
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.rows.setup import PromptProcessor
from nemo_rl.environments.client import EnvironmentPool
from nemo_rl.environments.config import AgentEnvironmentConfig, AnyEnvironmentConfig, raw_text
from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.engine_config import EngineConfig
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import AgentEnvironment, RolloutWorkerSettings
from nemo_rl.types import SamplingParams
from nemo_rl.utils.tokenizer import decode, survives_text


def worker_settings(
    process: PromptProcessor,
    *,
    environments: Mapping[str, Sequence[Any]],
    env: Mapping[str, AnyEnvironmentConfig],
    limits: EpisodeLimits,
    env_step_timeout_s: float,
    worker_timeout_s: float,
    seed: int,
    model_name: str,
    vocab_size: int,
    engine: EngineConfig,
) -> RolloutWorkerSettings:
    """`environments`: section of `env` -> actor handles. A request to an engine may take half of `worker_timeout_s`.

    Agents get `model_name` and `vocab_size` of the model, and the settings of chat in `engine`.
    """
    connect_agents: Callable[[], Mapping[str, AgentEnvironment]] = dict
    task_to_env = {name: task.env_name for name, task in process.tasks.items()}
    if agents := {name: config for name in environments if isinstance(config := env[name], AgentEnvironmentConfig)}:
        from nemo_rl.algorithms.parts.agents import make_connect_agents

        connect_agents = make_connect_agents(
            agents,
            environments,
            task_to_env,
            name=model_name,
            tokenizer=process.tokenizer,
            vocab_size=vocab_size,
            engine=engine,
            max_calls=limits.max_turns,
            max_model_len=limits.max_total_tokens,
            env_step_timeout_s=env_step_timeout_s,
        )
    of_nemo_rl = frozenset(name for name in environments if raw_text(env[name]))
    return RolloutWorkerSettings(
        process=process,
        decode=partial(decode, process.tokenizer),
        survives_text=partial(survives_text, process.tokenizer),
        render=ObservationRenderer(process.tokenizer, process.images),
        open_images=None if process.images is None else open_images,
        connect_environments=partial(
            connect_environments, environments, task_to_env, env_step_timeout_s, of_nemo_rl=of_nemo_rl
        ),
        limits=limits,
        run_seed=seed,
        raw_text=frozenset(task for task, name in task_to_env.items() if name in of_nemo_rl),
        engine_timeout_s=worker_timeout_s / 2,
        connect_agents=connect_agents,
    )


def connect_environments(
    actors: Mapping[str, Sequence[Any]],
    task_to_env: Mapping[str, str],
    step_timeout_s: float,
    *,
    of_nemo_rl: Collection[str] = (),
) -> dict[str, EnvironmentPool]:
    """Environments by task name. One pool per environment, so that all its episodes share batches.

    `of_nemo_rl`: those with the contract of NeMo RL.
    """
    environments = {
        name: EnvironmentPool(name, handles, step_timeout_s, of_nemo_rl=name in of_nemo_rl)
        for name, handles in actors.items()
    }
    return {task: environments[name] for task, name in task_to_env.items()}


def sampling_params(generation: GenerationConfig, tokenizer: PreTrainedTokenizerFast) -> SamplingParams:
    """Sampling as `generation` says. Without `stop_token_ids`, the end-of-sequence token stops a completion."""
    end: Any = tokenizer.eos_token_id  # a number, for a single token
    stops = generation.stop_token_ids if generation.stop_token_ids is not None else [end]
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=tuple(stops),
        stop_strings=tuple(generation.stop_strings or ()),
        bad_words=tuple(generation.bad_words or ()),
    )
