"""Environments by name: a section of `env` -> a running actor."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import ray
from ray.actor import ActorClass
from ray.exceptions import RayActorError

from nemo_rl.environments.config import (
    AnyEnvironmentConfig,
    EnvironmentConfig,
    MathEnvironmentConfig,
    RewardModelEnvironmentConfig,
)

MAX_RESTARTS = 100  # of one actor: Ray starts it again when its process dies; each death costs only its calls

ENV_REGISTRY: dict[str, dict[str, str]] = {
    "math": {
        "actor_class_fqn": "nemo_rl.environments.math.MathEnvironment",
        "default_processor": "math_hf_data_processor",
    },
    "reward_model": {
        "actor_class_fqn": "nemo_rl.environments.reward_model.RewardModelEnvironment",
        "default_processor": "conversation_processor",
    },
}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Make a class (`package.module.Class` or `package.module:Class`) available as `env.<section>.type: <env_name>`.

    Raises:
        ValueError: when the name is taken.
    """
    if env_name in ENV_REGISTRY:
        raise ValueError(f"an environment named {env_name!r} is registered already")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def find_env_class(env_type: str) -> Any:
    """The class (plain or a Ray actor class) behind a registry name or an import path.

    Raises:
        ValueError: when there is none.
    """
    path = ENV_REGISTRY[env_type]["actor_class_fqn"] if env_type in ENV_REGISTRY else env_type
    module_name, separator, class_name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not separator:
        near = get_close_matches(env_type, ENV_REGISTRY, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(ENV_REGISTRY)}."
        raise ValueError(f"unknown environment {env_type!r}. {hint} An import path (my_package.envs:MyEnv) works too")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment {env_type!r}: no module {error.name!r} can be imported from here") from error
    if class_name not in vars(module):
        raise ValueError(f"environment {env_type!r}: module {module_name!r} has no {class_name!r}")
    return vars(module)[class_name]


def create_env(env_name: str, env_config: AnyEnvironmentConfig | Mapping[str, Any]) -> Any:
    """Start the environment of section `env.<env_name>` as a Ray actor and return its handle.

    `env_config.type` names the class (`env_name` does in a mapping without `type`); the constructor gets the other keys
    as one dictionary. The actor imports from the driver's import paths and is restarted when its process dies.

    Raises:
        ValueError: for an unknown environment, and one that asks for a GPU when none is left.
    """
    env_type, options = _type_and_options(env_name, env_config)
    env_class = find_env_class(env_type)
    # The worker process imports the class by name, so it needs the paths it was found on here.
    runtime_env = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    if isinstance(env_class, ActorClass):
        actor_class = env_class.options(max_restarts=MAX_RESTARTS, runtime_env=runtime_env)
    else:
        num_gpus = _num_gpus(env_name, env_config)
        actor_class = ray.remote(env_class).options(
            num_cpus=0, num_gpus=num_gpus, max_restarts=MAX_RESTARTS, runtime_env=runtime_env
        )
    return actor_class.remote(options)


def wait_for_envs(actors: Mapping[str, Any]) -> None:
    """Return once the environments of `create_env`, by section of `env`, are constructed.

    Raises:
        ValueError: naming the environment whose constructor raised, and where.
    """
    for name, actor in actors.items():
        try:
            ray.get(actor.__ray_ready__.remote())
        except RayActorError as error:
            lines = [line.strip() for line in str(error).strip().splitlines()]
            where = next((line for line in reversed(lines) if line.startswith("File ")), "no stack is known")
            raise ValueError(f"environment {name!r} (env.{name}) cannot be started: {lines[-1]} ({where})") from error


def _num_gpus(env_name: str, env_config: AnyEnvironmentConfig | Mapping[str, Any]) -> int:
    if not isinstance(env_config, RewardModelEnvironmentConfig):
        return 0
    wanted = env_config.resources.gpus_per_node
    free = ray.available_resources().get("GPU", 0.0)
    if wanted > free:  # Ray would wait for it for ever
        raise ValueError(
            f"env.{env_name}.resources.gpus_per_node={wanted}: no GPU is left for it; lower cluster.gpus_per_node by "
            f"one, or set env.{env_name}.resources.gpus_per_node=0 to score on the CPU"
        )
    return wanted


def _type_and_options(
    env_name: str, env_config: AnyEnvironmentConfig | Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    if isinstance(env_config, EnvironmentConfig):
        return env_config.type, env_config.options
    if isinstance(env_config, MathEnvironmentConfig | RewardModelEnvironmentConfig):
        return env_config.type, env_config.model_dump(exclude={"type"})
    options = dict(env_config)
    return options.pop("type", env_name), options
