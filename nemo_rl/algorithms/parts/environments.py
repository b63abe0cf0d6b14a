"""The environments of a run: what their sections name is checked, and their actors are started."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from nemo_rl.algorithms.run import Command
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.data.rows.dataloader import PromptDataset
from nemo_rl.data.rows.setup import PromptProcessor
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.config import (
    BUILT_IN_TOOLS,
    AnyEnvironmentConfig,
    CompositeEnvironmentConfig,
    LLMJudgeEnvironmentConfig,
    judges_of,
    named_sections,
    own_python,
    sections_of,
)
from nemo_rl.environments.registry import create_envs, end_envs, env_class_path, find_env_class
from nemo_rl.utils.registry import import_object

# Type of environment -> the key that names something outside of the configuration, and the check of its value.
ENVIRONMENT_INPUTS = {
    "retrieval": ("dataset_name", "nemo_rl.environments.retrieval:check_corpus"),
    "python_tools": ("tools", "nemo_rl.environments.code.tools:import_tool"),
    "llm_judge": ("api_key_env", "nemo_rl.utils.registry:token_in"),
    "agent": ("run", "nemo_rl.environments.agents.interfaces:import_agent"),
    "mcp": ("environment.type", "nemo_rl.environments.registry:find_env_class"),
    "remote": ("token_env", "nemo_rl.utils.registry:token_in"),
}
LOAD_REWARD = "nemo_rl.environments.rewards:load_reward"


@dataclass(frozen=True)
class Environments:
    """The environments that a run uses: all sections of `env`, and the names of those with prompts."""

    sections: Mapping[str, AnyEnvironmentConfig]
    names: tuple[str, ...]

    @classmethod
    def prepare(cls, env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str], *, starts: bool = True) -> Self:
        """Check the sections `names`; see `check_environments`."""
        used = tuple(dict.fromkeys(names))
        check_environments(env, used, starts=starts)
        return cls(env, used)

    def start(self, command: Command, cluster: RayVirtualCluster) -> Mapping[str, Sequence[Any]]:
        """Begin to start the actors, by section. They end with the command; `wait_for_envs` waits for them."""
        actors = create_envs(sections_to_start(self.sections, self.names), cluster)
        command.stack.callback(end_envs, actors)
        return actors

    def check_metadata(self, process: PromptProcessor, datasets: Iterable[PromptDataset]) -> None:
        """Check what environments read of the first row of each dataset.

        Reward models and judges read conversations without images to be seen; the code environment reads tests.
        """
        from nemo_rl.environments.code.environment import read_tests
        from nemo_rl.environments.rewards import conversation_of

        readers: dict[str, tuple[str, Callable[[Any], object]]] = {  # by type of environment
            "reward_model": ("reward model", partial(conversation_of, reader="reward model")),
            "llm_judge": ("judge", partial(conversation_of, reader="judge")),
            "code": ("code environment", read_tests),
        }
        for prompt in (dataset[dataset.start_of(n)] for dataset in datasets for n in range(len(dataset.parts))):
            for name in named_sections(self.sections, [process.tasks[prompt.task_name].env_name]):
                if (reader := readers.get(self.sections[name].type)) is None:
                    continue
                kind, read = reader
                try:
                    read(process(prompt)["extra_env_info"])
                except ValueError as error:
                    raise ValueError(
                        f"dataset {prompt.task_name!r} is for the {kind} env.{name}, and {error}"
                    ) from error


def check_environments(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str], *, starts: bool = True) -> None:
    """Import the classes of the sections `names` and of the parts of composites among them.

    If the environments start (`starts`), also check what they need from outside: environment variables, local files
    and import paths. Servers and models are asked when they start.
    """
    for name in named_sections(env, sorted(judges_of(env, names))):
        if own_python(env[name]) is not None:
            env_class_path(env[name].type)  # only its own Python imports it
            continue
        find_env_class(env[name].type)
        for key, check, value in named_outside(name, env[name]) if starts else ():
            try:
                import_object(check, "check")(value)
            except (ValueError, FileNotFoundError) as error:
                raise type(error)(f"{key}: {error}") from error


def named_outside(name: str, section: AnyEnvironmentConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, import path of its check, value) of everything outside of the configuration that a section names."""
    if isinstance(section, CompositeEnvironmentConfig):
        for index, part in enumerate(section.reward_functions):
            if part.env is None:
                yield f"env.{name}.reward_functions.{index}", LOAD_REWARD, part
    elif section.type in ENVIRONMENT_INPUTS:
        field, check = ENVIRONMENT_INPUTS[section.type]
        value = attrgetter(field)(section)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in BUILT_IN_TOOLS:
                yield f"env.{name}.{field}", check, item


def sections_to_start(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """The sections `names` as their processes get them.

    Composites hold the sections that they name, and the models and prompt files of judges have absolute paths, since
    processes may run in another folder.

    Raises:
        ValueError: for an unknown `tiny:` model.
    """
    names = sorted(judges_of(env, names))
    sections = {name: env[name] for name in named_sections(env, names)}
    for name, section in sections.items():
        if isinstance(section, LLMJudgeEnvironmentConfig):
            model, prompt = section.model_name, section.prompt_file
            found = {
                "model_name": resolve_model(model) if model is not None else None,
                "prompt_file": str(Path(prompt).absolute()) if prompt is not None else None,
            }
            sections[name] = section.model_copy(update=found)
    return sections_of(sections, names)
