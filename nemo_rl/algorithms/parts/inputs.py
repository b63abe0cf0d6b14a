"""The inputs of a run, looked up without loading them: files, datasets, models, and names by import path.

An input that would stop the run is refused. Two kinds are only reported: the folder of a model that is not here, as an
earlier run may make it, and a name that only a hub knows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from pydantic import BaseModel

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.algorithms.config.loop import LossConfig
from nemo_rl.algorithms.config.ppo import PPOMasterConfig
from nemo_rl.algorithms.config.rollout import RolloutConfig, RolloutMasterConfig
from nemo_rl.algorithms.config.supervised import SupervisedMasterConfig
from nemo_rl.algorithms.parts.environments import named_outside
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.config.rules import Derived, StrictModel, value_of
from nemo_rl.data.config import (
    READERS_OF_FILES,
    DataSection,
    ExampleTableConfig,
    PreferenceDataConfig,
    PromptTexts,
    TableConfig,
)
from nemo_rl.data.datasets.hub import HUB_PATHS, HUB_SETS
from nemo_rl.data.datasets.registry import (
    CHECK_TASKS,
    GENERATED,
    DatasetFactory,
    find_factory,
    is_import_path,
    known_datasets,
)
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.model_folder import is_hub_name, unmade_config
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.environments.agents.config import AgentEnvironmentConfig
from nemo_rl.environments.config import (
    ENV_REGISTRY,
    LLMJudgeEnvironmentConfig,
    RetrievalEnvironmentConfig,
    RewardModelEnvironmentConfig,
    judges_of,
    named_sections,
    own_python,
)
from nemo_rl.environments.registry import find_env_class
from nemo_rl.evals.config import EvalDatasetConfig, EvalGenerationConfig, EvalMasterConfig
from nemo_rl.models.policy.config import (
    DraftConfig,
    DTensorConfig,
    LoRAConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from nemo_rl.utils.registry import MissingPackage, import_object
from nemo_rl.utils.tables import FORMATS, is_file, require_content, require_whole_file
from nemo_rl.utils.tokenizer import template_text


class Absent(Enum):
    """The findings of a look that refuses nothing."""

    HERE = auto()  # a folder that may still be made
    OFFLINE = auto()  # a name that only a hub knows


Look = Callable[[Any, Any], Absent | None]
"""(section, value of a key, not None) -> a line about it. ValueError or FileNotFoundError refuses the value."""


# -- Looks.


def _model(_: StrictModel, name: str) -> Absent | None:
    if unmade_config(name) is not None or Path(name).expanduser().exists():
        return None
    if not is_hub_name(name) or Path(name.partition("/")[0]).is_dir():
        return Absent.HERE
    try:
        return None if isinstance(try_to_load_from_cache(name, "config.json"), str) else Absent.OFFLINE
    except HFValidationError as error:
        raise ValueError(f"{name!r} is no folder here, and no name of a hub: {error}") from error


def _folder(_: StrictModel, path: str) -> Absent | None:
    return None if Path(path).expanduser().exists() else Absent.HERE


def _rollouts(_: StrictModel, folder: str) -> None:
    if not Path(folder).expanduser().is_dir():
        raise FileNotFoundError(f"the folder {folder!r} of recorded rollouts does not exist (looked in {Path.cwd()})")


def _template(section: TokenizerConfig, _: str) -> None:
    if section.chat_template != "default":
        template_text(section)


def _environment(_: StrictModel, env_type: str) -> None:
    find_env_class(env_type)


def _checked(_: StrictModel, value: Any, *, check: str) -> None:
    import_object(check, "check")(value)


def _loss(config: GRPOMasterConfig | PPOMasterConfig | SupervisedMasterConfig, cfg: LossConfig) -> None:
    if cfg.type is not None:
        from nemo_rl.algorithms.losses.own import make_loss

        make_loss(cfg, config.loss_section if isinstance(config, SupervisedMasterConfig) else cfg)


def _import(_: StrictModel, path: str, *, what: str) -> None:
    import_object(path, what)


def _text(_: StrictModel, file: str, *, key: str) -> None:
    TaskDataSpec(**{key: file})


def _processor(section: StrictModel, name: str) -> None:
    find_processor(name, of_examples=isinstance(section, ExampleTableConfig))


def _dataset(section: TableConfig, name: str) -> Absent | None:
    factory = find_factory(section)
    if name in GENERATED:
        _generated(section, name, factory)
    elif name in HUB_SETS:
        HUB_SETS[name].check(section)
    return None if name in known_datasets() or is_import_path(name) else _table(section, name)


def _generated(section: TableConfig, name: str, factory: DatasetFactory) -> None:
    """Checks `split` and `kwargs` by one row."""
    if name == "reasoning_gym":
        import_object(CHECK_TASKS, "check")(section)
        return
    number = section.kwargs.get("num_samples")
    is_number = number is None or (type(number) is int and number > 0)
    few = section.kwargs | {"num_samples": 1} if is_number else section.kwargs
    factory(section.model_copy(update={"kwargs": few}))


def _table(section: TableConfig, path: str) -> Absent | None:
    if Path(path).suffix in FORMATS:
        require_whole_file(path, section.subset, section.split)
    return _copy(section, path)


def _copy(section: TableConfig | EvalDatasetConfig, path: str) -> Absent | None:
    has_reader = section.dataset_name in known_datasets() and section.dataset_name not in READERS_OF_FILES
    return _rows(path, any_format=has_reader and Path(path).exists())


def _eval_dataset(section: EvalDatasetConfig, name: str) -> Absent | None:
    is_path = section.file_format is not None or is_file(name) or "/" in name
    if not is_path or ":" in name:
        find_factory(TableConfig(dataset_name=name, processor=""))
        return None
    return _rows(name, any_format=section.file_format is not None)


def _rows(path: str, *, any_format: bool) -> Absent | None:
    """Looks for a file or a folder of rows, or a dataset of the hub. `any_format`: its name need not say it."""
    if Path(path).is_dir():
        return None
    if is_file(path) or any_format:
        require_content(path)
        if Path(path).suffix not in FORMATS and not any_format:
            raise ValueError(f"dataset file {path!r}: unknown format; there are {', '.join(FORMATS)}")
        return None
    if path in HUB_PATHS:
        return None
    if not is_hub_name(path):
        raise FileNotFoundError(f"dataset {path!r} does not exist (looked in {Path.cwd()})")
    return Absent.OFFLINE


_TEXTS: dict[str, Look] = {key: partial(_text, key=key) for key in ("prompt_file", "system_prompt_file", "tools_file")}
LOOKS: Mapping[type[StrictModel], Mapping[str, Look]] = {
    PolicyConfig: {"model_name": _model},
    TokenizerConfig: {"name": _model, "chat_template": _template},
    EvalGenerationConfig: {"model_name": _model},
    DraftConfig: {"model_name": _folder},
    LoRAConfig: {"adapter_path": _folder},
    DTensorConfig: {"custom_parallel_plan": partial(_import, what="parallel plan")},
    **{run: {"loss_fn": _loss} for run in (GRPOMasterConfig, PPOMasterConfig, SupervisedMasterConfig)},
    OptimizerConfig: {"name": partial(_import, what="optimizer")},
    SchedulerConfig: {"name": partial(_import, what="scheduler")},
    DataSection: {"custom_dataloader": partial(_import, what="data loader")},
    PreferenceDataConfig: {"val_data_paths": lambda _, path: _rows(path, any_format=False)},
    TableConfig: {**_TEXTS, "processor": _processor, "dataset_name": _dataset, "data_path": _table},
    EvalDatasetConfig: {
        **{key: _TEXTS[key] for key in ("prompt_file", "system_prompt_file")},
        "processor": _processor,
        "dataset_name": _eval_dataset,
        "data_path": _copy,
    },
    RolloutConfig: {"replay_from": _rollouts},
    RewardModelEnvironmentConfig: {"model_name": _model, "checkpoint_path": _folder},
    LLMJudgeEnvironmentConfig: {"model_name": _model},
    RetrievalEnvironmentConfig: {
        "dataset_name": lambda _, name: None if ":" in name else _rows(name, any_format=False)
    },
    AgentEnvironmentConfig: {"verifier": partial(_import, what="verifier")},
}
"""Section -> the keys that name something outside of the configuration; those of base classes count too."""
ELSEWHERE = {
    "nemo_rl.utils.registry:token_in",  # an environment variable of the machine that runs
    "nemo_rl.environments.retrieval:check_corpus",  # in LOOKS
}
"""Checks of environments that are left out."""


# -- All of them.


@dataclass
class Inputs:
    """The names in a configuration that this machine does not have."""

    problems: list[Problem] = field(default_factory=list)  # the run would stop
    not_here: dict[str, str] = field(default_factory=dict)  # name -> the first key that has it
    not_checked: dict[str, str] = field(default_factory=dict)
    not_installed: dict[str, str] = field(default_factory=dict)  # key -> which package its module imports

    @classmethod
    def of(cls, config: BaseModel) -> "Inputs":
        """Look up everything that a run of `config` would open."""
        inputs = cls()
        for section in sections_in(config):
            for base in type(section).__mro__:
                for name, look in LOOKS.get(base, {}).items():
                    inputs._look(section, _written_at(config, section, name), vars(section)[name], look)
        if isinstance(config, RolloutMasterConfig | EvalMasterConfig):
            for name in used_environments(config):
                section = config.env[name]
                if section.type not in ENV_REGISTRY and own_python(section) is None:
                    inputs._look(section, f"env.{name}.type", section.type, _environment)
                for key, check, value in named_outside(name, section):
                    if check not in ELSEWHERE:
                        inputs._look(section, key, value, partial(_checked, check=check))
        return inputs

    def _look(self, section: Any, key: str, value: Any, look: Look) -> None:
        if isinstance(value, dict):
            for name, entry in value.items():
                self._look(section, f"{key}.{name}", entry, look)
        elif value is not None:
            try:
                found = look(section, value)
            except MissingPackage as error:
                self.not_installed[key] = str(error)
            except (ValueError, FileNotFoundError) as error:
                self.problems.append(Problem(tuple(key.split(".")), str(error).removeprefix(f"{key}: ")))
            else:
                told = {Absent.HERE: self.not_here, Absent.OFFLINE: self.not_checked}
                if found is not None:
                    told[found].setdefault(value, key)

    def lines(self) -> list[str]:
        """Lines for `--dry-run`. ConfigError for what would stop the run."""
        if self.problems:
            raise ConfigError(self.problems)
        lines = [f"{key}: {name} does not exist here" for name, key in self.not_here.items()]
        lines += [f"{key}: {text}" for key, text in self.not_installed.items()]
        if self.not_checked:
            names = ", ".join(f"{key}={name}" for name, key in self.not_checked.items())
            lines.append(f"not checked without a network, and no file or folder here: {names}")
        return lines


def _written_at(config: BaseModel, section: StrictModel, name: str) -> str:
    """The key of a value, or the key of the default that it repeats."""
    for mark in type(section).model_fields[name].metadata:
        key = mark.interpolation.strip("${}") if isinstance(mark, Derived) else "."
        if not key.startswith(".") and value_of(config, key) == vars(section)[name]:
            return key
    return section.key(name)


def sections_in(value: Any) -> Iterator[StrictModel]:
    """The sections of a run that it reads, outermost first: neither those that are switched off nor defaults."""
    if isinstance(value, StrictModel):
        if vars(value).get("enabled") is False or isinstance(value, PromptTexts):
            return
        yield value
        if isinstance(value, RolloutMasterConfig | EvalMasterConfig):
            env = {name: value.env[name] for name in used_environments(value)}
            yield from sections_in({key: entry for key, entry in value if key != "env"} | {"env": env})
            return
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in (entry for _, entry in value) if isinstance(value, StrictModel) else entries:
        yield from sections_in(entry)


def used_environments(config: RolloutMasterConfig | EvalMasterConfig) -> list[str]:
    """The sections of `env` that the run starts."""
    if isinstance(config, EvalMasterConfig):
        used = {name for dataset in config.data.chosen if (name := config.environment_of(dataset)) is not None}
    elif config.rollout.replay_from is not None:
        used = set()
    else:
        used = {dataset.env_name for dataset in [*config.data.train, *(config.data.validation or [])]}
    return named_sections(config.env, sorted(judges_of(config.env, used)))
