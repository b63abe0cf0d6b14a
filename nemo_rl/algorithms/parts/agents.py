"""The agents of a run: tokenizer and limits of their sessions, and the addresses at which they listen."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.environments.agents.config import AgentEnvironmentConfig
from nemo_rl.environments.client import EnvironmentPool
from nemo_rl.environments.code.tools import find_calls
from nemo_rl.environments.registry import MAX_RESTARTS
from nemo_rl.models.generation.engine_config import EngineConfig
from nemo_rl.models.policy.convert import is_checkpoint, model_of_checkpoint
from nemo_rl.rollouts.agents.frozen import FrozenModel, frozen_generate
from nemo_rl.rollouts.agents.play import Agents, AgentSettings
from nemo_rl.rollouts.agents.session import SessionLimits
from nemo_rl.rollouts.openai_server import AnswerSettings
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.tokenizer import decode, encode


def answer_settings(
    model: str, tokenizer: PreTrainedTokenizerBase, engine: EngineConfig, vocab_size: int, max_model_len: int
) -> AnswerSettings:
    """How requests in OpenAI's format become tokens, and completions become answers."""
    chat = engine.http_server_serving_chat_kwargs
    return AnswerSettings(
        model=model,
        make_chat=partial(ServedChat, tokenizer, chat.default_chat_template_kwargs),
        calls_of=find_calls if chat.enable_auto_tools else None,
        encode=partial(encode, tokenizer),
        decode=partial(decode, tokenizer),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
    )


def make_connect_agents(
    sections: Mapping[str, AgentEnvironmentConfig],
    actors: Mapping[str, Sequence[Any]],
    task_to_env: Mapping[str, str],
    *,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    engine: EngineConfig,
    max_calls: int,
    max_model_len: int,
    env_step_timeout_s: float,
) -> Callable[[], Mapping[str, Agents]]:
    """The function that makes the agents by task name in the rollout worker.

    `actors`: section of `env` -> actor handles. `name`: the model's. `max_calls`: calls of the model in an episode at
    most. `max_model_len`: tokens of the engine's longest sequence.
    """
    answers = answer_settings(name, tokenizer, engine, vocab_size, max_model_len)
    settings = {
        section: AgentSettings(
            name=section,
            answers=answers,
            limits=SessionLimits(max_calls=max_calls, max_generated_tokens=config.max_generated_tokens),
            host=config.session.host,
            port=config.session.port,
            verifies=config.verifier is not None,
            credit=config.credit,
            discount=config.discount,
        )
        for section, config in sections.items()
    }
    frozen = {
        section: {
            role: None if model is None else _start_frozen(model, engine.wire_dtype) for role, model in c.roles.items()
        }
        for section, c in sections.items()
    }
    judges = {section: config.environment for section, config in sections.items()}
    return partial(_connect, settings, judges, frozen, env_step_timeout_s, actors, task_to_env)


def _start_frozen(name: str, dtype: str) -> Any:
    """An actor with constant weights: of a model, or of the newest sound checkpoint in a folder."""
    path = Path(name).expanduser()
    if not (path / "config.json").is_file() and is_checkpoint(path):
        found = model_of_checkpoint(path, dtype=dtype, cache=cache_root(), resolve_base=resolve_model)
        model = str(found.model)
    else:
        model = resolve_model(name)
    return ray.remote(FrozenModel).options(num_cpus=0, max_restarts=MAX_RESTARTS, max_task_retries=-1).remote(model)


def _connect(
    settings: Mapping[str, AgentSettings],
    judges: Mapping[str, str | None],
    frozen: Mapping[str, Mapping[str, Any]],
    env_step_timeout_s: float,
    actors: Mapping[str, Sequence[Any]],
    task_to_env: Mapping[str, str],
) -> dict[str, Agents]:
    agents = {}
    for name, own in settings.items():
        judge = judges[name]
        step = None if judge is None else EnvironmentPool(judge, actors[judge], env_step_timeout_s).step
        decode_own = own.answers.decode
        roles = {role: None if a is None else frozen_generate(a, decode_own) for role, a in frozen[name].items()}
        agents[name] = Agents(own, actors[name], step, roles)
    return {task: agents[name] for task, name in task_to_env.items() if name in agents}
