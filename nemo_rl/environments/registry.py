"""Environments by name: a section of `env` -> a running actor."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.actor import ActorClass
from ray.exceptions import ActorUnavailableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayError

from nemo_rl.config.loader import build_config
from nemo_rl.config.rules import StrictModel
from nemo_rl.distributed.errors import ACTOR_DEATHS, death_text
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, ray_loss
from nemo_rl.environments.client import RESTART_POLL_S, cause_of
from nemo_rl.environments.config import (
    ENV_REGISTRY,
    AgentEnvironmentConfig,
    AnyEnvironmentConfig,
    EnvSection,
    check_supported,
    environment_gpus,
    gpus_per_actor,
    keys_of,
    own_python,
    unknown_type,
)
from nemo_rl.environments.interfaces import SHUTDOWN_TIMEOUT_S, EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.environments.section_parts import Actors
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.registry import import_object

logger = logging.getLogger(__name__)

MAX_RESTARTS = 100  # of one actor: Ray starts it again when its process dies; each death costs only its calls


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Make a class (`package.module.Class` or `package.module:Class`) available as `env.<section>.type: <env_name>`."""
    if env_name in ENV_REGISTRY:
        raise ValueError(f"an environment named {env_name!r} is registered already")
    ENV_REGISTRY[env_name] = actor_class_fqn


def find_env_class(env_type: str) -> Any:
    """The class (plain or a Ray actor class) behind a registry name or an import path.

    ValueError without one, or for a class that is no `EnvironmentInterface`.
    """
    found = import_object(env_class_path(env_type), "environment")
    plain = _plain_class(found)
    if env_type != "agent" and not (isinstance(plain, type) and issubclass(plain, EnvironmentInterface)):
        raise ValueError(
            f"environment {env_type!r} is no EnvironmentInterface: derive the class from "
            "nemo_rl.environments.interfaces.EnvironmentInterface"
        )
    return found


def _plain_class(env_class: Any) -> Any:
    return vars(env_class)["__ray_metadata__"].modified_class if isinstance(env_class, ActorClass) else env_class


def env_class_path(env_type: str) -> str:
    """The import path behind a registry name, or `env_type` if it is one. ValueError for an unknown name."""
    check_supported(env_type)
    if problem := unknown_type(env_type):
        raise ValueError(problem)
    return ENV_REGISTRY.get(env_type, env_type)


def new_environment(env_name: str, env_config: AnyEnvironmentConfig | Mapping[str, Any]) -> EnvironmentInterface[Any]:
    """The environment of a section in this process, without an actor; see `create_env`."""
    options = keys_of(_checked(env_name, env_config))
    return _plain_class(find_env_class(options.pop("type", env_name)))(options)


def create_envs(
    env: Mapping[str, AnyEnvironmentConfig | Mapping[str, Any]], cluster: RayVirtualCluster
) -> dict[str, list[Any]]:
    """Start the environments of a run: section of `env` -> its `num_actors` actors; see `create_env`.

    ValueError for an unknown environment, or when `cluster` leaves fewer GPUs than all of them ask for together.
    """
    cluster.bundles()  # otherwise reserved at first use, and its GPUs would look free
    _check_gpus(environment_gpus(env), ray.available_resources().get("GPU", 0.0))
    actors: dict[str, list[Any]] = {}
    for name, config in env.items():
        num_actors = config.num_actors if isinstance(config, Actors) else 1
        actors[name] = [create_env(name, config) for _ in range(num_actors)]
    return actors


class _Sections(StrictModel):
    env: EnvSection


class HostedEnvironment(EnvironmentInterface[Any]):
    """The environment of a section, which only this process imports."""

    def __init__(self, env_name: str, options: Mapping[str, Any]) -> None:
        self.environment = new_environment(env_name, options)
        self.may_repeat_step = self.environment.may_repeat_step

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        return self.environment.step(message_log_batch, metadata)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        return self.environment.global_post_process_and_metrics(batch)

    def shutdown(self) -> None:
        self.environment.shutdown()


def _checked(env_name: str, env_config: Any) -> Any:
    """A mapping for an environment of the library, also in NeMo RL's form, as its section. Others as they are."""
    is_mapping = isinstance(env_config, Mapping)
    if not is_mapping or not env_class_path(env_config.get("type", env_name)).startswith("nemo_rl."):
        return env_config
    return build_config(_Sections, {"env": {env_name: env_config}}).env[env_name]


def create_env(env_name: str, env_config: AnyEnvironmentConfig | Mapping[str, Any]) -> Any:
    """Start the environment of section `env.<env_name>` as a Ray actor and return its handle.

    `env_config.type` names the class (`env_name` does in a mapping without `type`); the constructor gets the other keys
    as one dictionary. The actor is restarted when its process dies. ValueError for an unknown environment, and for a
    mapping with keys that an environment of the library does not have in any form.
    """
    env_config = _checked(env_name, env_config)
    keys = keys_of(env_config)
    env_type = keys.pop("type", env_name)
    # The worker process imports the class by name, so it needs the import paths of this process.
    runtime_env = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    if (py_executable := own_python(env_config)) is not None:
        from nemo_rl.distributed.own_python import runtime_env_of

        runtime_env = runtime_env_of(py_executable, f"env.{env_name}.py_executable")
    if py_executable is None or isinstance(env_config, AgentEnvironmentConfig):
        env_class, arguments = find_env_class(env_type), (keys,)  # an `AgentRunner` imports its agent by itself
    else:  # this process may be unable to import the class
        env_class, arguments = HostedEnvironment, (env_name, {**keys, "type": env_class_path(env_type)})
    options: dict[str, Any] = {"max_restarts": MAX_RESTARTS, "runtime_env": runtime_env}
    if not isinstance(env_class, ActorClass):
        env_class = ray.remote(env_class)
        options |= {"num_cpus": 0, "num_gpus": gpus_per_actor(env_config)}
    return env_class.options(**options).remote(*arguments)


def wait_for_envs(actors: Mapping[str, Sequence[Any]], timeout_s: float) -> None:
    """Return once the environments of `create_envs`, by section of `env`, are constructed.

    ValueError names one whose constructor raised, and where, or one that has not started after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    ready = {name: [actor.__ray_ready__.remote() for actor in handles] for name, handles in actors.items()}
    for name, refs in ready.items():
        try:
            ray.get(refs, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise ValueError(
                f"environment {name!r} (env.{name}) has not started in {timeout_s:.4g} s. It may wait for a GPU in "
                f"use (env.{name}.resources: lower gpus_per_node, there or in cluster), or for its model to be "
                "loaded (raise cluster.worker_timeout_s)"
            ) from error
        except OutOfMemoryError as error:
            raise ValueError(f"environment {name!r} (env.{name}) cannot be started: {death_text(error)}") from error
        except RayActorError as error:
            lines = [line.strip() for line in str(error).strip().splitlines()]
            where = next((line for line in reversed(lines) if line.startswith("File ")), "no stack is known")
            raise ValueError(f"environment {name!r} (env.{name}) cannot be started: {lines[-1]} ({where})") from error


def end_envs(actors: Mapping[str, Sequence[Any]], timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Call `shutdown` of the environments of `create_envs`, all at once, and end their processes.

    They have `timeout_s` seconds together. A problem is a warning that names the environment.
    """
    if not ray.is_initialized() or ray_loss() is not None:  # nobody would answer
        return
    deadline = time.monotonic() + timeout_s
    named = [(name, actor) for name, handles in actors.items() for actor in handles]
    with ThreadPoolExecutor(max(1, len(named)), thread_name_prefix="end_envs") as threads:
        problems = threads.map(lambda one: _end_env(one[1], deadline), named)
        for (name, _), problem in zip(named, problems, strict=True):
            if problem is not None:
                logger.warning("environment %s: shutdown %s", name, problem)


def _end_env(actor: Any, deadline: float) -> str | None:
    """Call `shutdown` in the actor's living process, and end it. Returns the problem, if there is one."""
    try:
        if _lives(actor, deadline):
            ray.get(actor.shutdown.remote(), timeout=max(0.0, deadline - time.monotonic()))
        return None
    except GetTimeoutError:
        return "has not ended in time, and its process is killed"
    except RayError as error:
        return f"failed: {cause_of(error)!r}"
    finally:
        ray.kill(actor)


def _lives(actor: Any, deadline: float) -> bool:
    """Whether the actor has a process, after a wait if Ray restarts it. GetTimeoutError at the deadline."""
    while True:
        left = deadline - time.monotonic()
        try:
            return ray.get(actor.__ray_ready__.remote(), timeout=max(0.0, left))
        except ActorUnavailableError:
            if left < 0:
                raise
            time.sleep(RESTART_POLL_S)
        except ACTOR_DEATHS:  # it could not be constructed, or ended too often
            return False


def _check_gpus(wanted: Mapping[str, int], free: float) -> None:
    total = sum(wanted.values())
    if total > free:  # Ray would wait forever
        asked = ", ".join(f"env.{name}.resources.gpus_per_node={number}" for name, number in wanted.items())
        first = next(iter(wanted))
        raise ValueError(
            f"{asked}: {total:g} GPU(s) wanted beside the cluster's, {free:g} left; lower cluster.gpus_per_node by "
            f"{total - free:g}, or set env.{first}.resources.gpus_per_node=0 to score on the CPU"
        )
