"""What can be known to go wrong before Ray starts: everything but the machines and the run itself.

Each check raises ValueError with what to change.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.rows.dataloader import PromptDataset
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.environments.code.tools import import_tool
from nemo_rl.environments.config import (
    BUILT_IN_TOOLS,
    AnyEnvironmentConfig,
    CompositeEnvironmentConfig,
    LLMJudgeEnvironmentConfig,
    PythonToolsEnvironmentConfig,
    RemoteEnvironmentConfig,
    RetrievalEnvironmentConfig,
    named_sections,
    sections_of,
)
from nemo_rl.environments.http_client import bearer
from nemo_rl.environments.registry import find_env_class
from nemo_rl.environments.retrieval import check_corpus
from nemo_rl.environments.rewards import check_arguments, find_reward_function
from nemo_rl.models.policy.checkpoint import names_and_shapes, policy_tensors
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor.lora import apply_lora
from nemo_rl.models.policy.dtensor.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.experts import num_experts
from nemo_rl.models.policy.megatron.files import check_checkpoint, refuse_megatron_checkpoint
from nemo_rl.models.policy.pretrained import build_on_meta
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager, check_identity, require_optimizer
from nemo_rl.utils.checkpoint.tensors import DamagedTensorsError, check_checkpoint_fits
from nemo_rl.utils.config import CheckpointingConfig

# -- The sections of `env` that a run starts, as it starts them.


def sections_to_start(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> dict[str, AnyEnvironmentConfig]:
    """Name -> section, with the sections that composites name in them, and models and prompts of judges found.

    Raises:
        ValueError: for an unknown `tiny:` model.
    """
    names = sorted(set(names))
    return sections_of({name: _located(env[name]) for name in named_sections(env, names)}, names)


def _located(config: AnyEnvironmentConfig) -> AnyEnvironmentConfig:
    if not isinstance(config, LLMJudgeEnvironmentConfig):
        return config
    found = {"model_name": resolve_model(config.model_name)} if config.model_name is not None else {}
    if config.prompt_file is not None:  # its process may run in another folder
        found["prompt_file"] = str(Path(config.prompt_file).absolute())
    return config.model_copy(update=found)


logger = logging.getLogger(__name__)

NUM_TRIED_PROMPTS = 32
READS_CONVERSATIONS = {"reward_model": "reward model", "llm_judge": "judge"}  # types of environments


def check_environments(config: RolloutMasterConfig, data: DataSetup) -> None:
    """Whether the class of every environment that is used, and of the parts of composites, can be imported."""
    for name in named_sections(config.env, sorted(set(data.task_to_env.values()))):
        find_env_class(config.env[name].type)


def check_environment_inputs(env: Mapping[str, AnyEnvironmentConfig], names: Iterable[str]) -> None:
    """Whether what the sections `names`, and the parts of composites among them, need from outside is here.

    That is environment variables, local files and import paths. Servers and models are asked when they start.

    Raises:
        ValueError, FileNotFoundError: naming the key.
    """
    for name in named_sections(env, sorted(set(names))):
        section, key = env[name], f"env.{name}"
        if isinstance(section, RetrievalEnvironmentConfig):
            with _named(f"{key}.dataset_name"):
                check_corpus(section.dataset_name)
        elif isinstance(section, PythonToolsEnvironmentConfig):
            for tool in section.tools:
                if tool not in BUILT_IN_TOOLS:
                    with _named(f"{key}.tools"):
                        import_tool(tool)
        elif isinstance(section, LLMJudgeEnvironmentConfig):
            bearer(section.api_key_env, f"{key}.api_key_env")
        elif isinstance(section, RemoteEnvironmentConfig):
            bearer(section.token_env, f"{key}.token_env")
        elif isinstance(section, CompositeEnvironmentConfig):
            for index, part in enumerate(section.reward_functions):
                if part.env is None:
                    with _named(f"{key}.reward_functions.{index}"):
                        check_arguments(part.function, find_reward_function(part.function), part.kwargs)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """What is raised about an input, with its key."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{key}: {error}") from error


def check_reward_models(config: RolloutMasterConfig, data: DataSetup, process: PromptProcessor) -> None:
    """Whether what reward models score is handed to them: the conversation, by `conversation_processor` or another."""
    for dataset in (data.train, data.validation):
        starts = np.cumsum([0, *(len(part) for part in dataset.parts)][:-1]) if dataset is not None else ()
        for start in starts:
            assert dataset is not None
            prompt = dataset[int(start)]
            env_name = data.tasks[prompt.task_name].env_name
            for name in named_sections(config.env, [env_name]):
                kind = READS_CONVERSATIONS.get(config.env[name].type)
                if kind is None or "messages" in (process(prompt)["extra_env_info"] or {}):
                    continue
                raise ValueError(
                    f"dataset {prompt.task_name!r} is answered by the {kind} env.{name}, which scores conversations, "
                    "and its processor hands none on; set processor: conversation_processor for it, or in data.default"
                )


def check_optimizer(policy: PolicyConfig) -> None:
    """Whether optimizer and scheduler can be made, on one small parameter. Megatron's are what its section says."""
    if policy.megatron_cfg.enabled:
        return
    assert policy.optimizer is not None
    optimizer = build_optimizer(policy.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    build_scheduler(policy.scheduler, optimizer)


def check_prompts(process: PromptProcessor, dataset: PromptDataset, label: str) -> None:
    """Make prompts of rows from all over the dataset; not all of them may be too long."""
    indices = np.linspace(0, len(dataset) - 1, min(len(dataset), NUM_TRIED_PROMPTS)).round().astype(int)
    data = [process(dataset[int(index)]) for index in indices]
    if all(datum["loss_multiplier"] == 0.0 for datum in data):
        lengths = [datum["length"] for datum in data]
        limit = process.max_input_seq_length
        raise ValueError(
            f"all prompts tried of the {label} data are longer than data.max_input_seq_length={limit} tokens: "
            f"{len(data)} of them have {min(lengths)} to {max(lengths)}; raise it and "
            "policy.max_total_sequence_length, or shorten the prompts"
        )


QUESTION = {"role": "user", "content": "first question"}
PLAIN = ("first answer", "second answer")
THOUGHTFUL = tuple(f"<think>\na thought\n</think>\n\n{answer}" for answer in PLAIN)


def check_turns(config: RolloutMasterConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say, for runs of several turns, where the model sees something else than its chat template would write.

    Episodes never rewrite what was sampled, so a template that writes earlier turns differently once more follow is
    followed in the first turn only.

    Raises:
        ValueError: when the template allows no second turn.
    """
    if config.rollout.max_rollout_turns == 1:
        return
    render = ObservationRenderer(tokenizer)
    for answers, what in ((PLAIN, "earlier turns"), (THOUGHTFUL, "the thoughts of earlier turns")):
        for role in ("user", "tool"):
            observation = {"role": role, "content": "what came of it"}
            seen, rendered = render.seen_and_rendered([QUESTION], answers, observation)
            if seen != rendered:
                pairs = enumerate(zip(seen, rendered, strict=False))
                same = next((i for i, (a, b) in pairs if a != b), min(len(seen), len(rendered)))
                logger.warning(
                    "the chat template writes %s differently once more follow (role %r). Episodes keep what was "
                    "sampled: after %r the model sees %r where the template would write %r. Fine when the model is "
                    "meant to be trained so; otherwise set policy.tokenizer.chat_template to one that keeps turns",
                    what,
                    role,
                    seen[max(0, same - 40) : same],
                    seen[same : same + 120],
                    rendered[same : same + 120],
                )
                return


def check_checkpoint_dir(config: CheckpointingConfig, identity: Mapping[str, Any]) -> None:
    """Whether checkpoints can be written, and those there belong to this run. Their files are read when it resumes.

    Raises:
        CheckpointIdentityError: with every difference.
        CheckpointError: when the newest cannot be continued.
    """
    if not config.enabled:
        return
    manager = CheckpointManager(config)
    latest = manager.latest_finished()
    if latest is not None:
        info = manager.load_training_info(latest)
        assert info is not None
        check_identity(info["identity"], identity)
        require_optimizer(latest)
    check_writable(manager.checkpoint_dir, "checkpointing.checkpoint_dir")


def check_metric_name(config: CheckpointingConfig, model: PretrainedConfig) -> None:
    """Whether `checkpointing.metric_name` is a metric of this kind of model."""
    name = config.metric_name or ""
    if config.enabled and name.startswith("train:moe/") and num_experts(model) == 0:
        raise ValueError(
            f"checkpointing.metric_name={name}: {model.model_type!r} is a dense model and has no experts to report of; "
            "set it to val:accuracy, train:reward or null"
        )


def check_saved_weights(
    checkpointing: CheckpointingConfig, policy: PolicyConfig, model: PretrainedConfig, folder: str = "policy"
) -> None:
    """Whether the weights of the newest checkpoint are those that this run trains, by their headers.

    `folder` of the checkpoint is where they are. Damaged ones are left to the resuming run, which falls back to an
    older checkpoint.

    Raises:
        CheckpointError: with the missing, the unexpected and the differently shaped tensors.
    """
    latest = CheckpointManager(checkpointing).latest_finished() if checkpointing.enabled else None
    if latest is None:
        return
    weights = latest / folder / "weights"
    if not weights.is_dir():
        raise CheckpointError(f"{latest} holds no {folder}/weights")
    if policy.megatron_cfg.enabled:
        check_checkpoint(latest / folder, policy, model)
        return
    refuse_megatron_checkpoint(latest / folder)
    lora_cfg = policy.dtensor_cfg.lora_cfg
    hf = build_on_meta(copy.deepcopy(model), torch.float32)
    if lora_cfg.enabled:
        apply_lora(hf, lora_cfg)
    tensors = policy_tensors([hf], trained_only=lora_cfg.enabled)
    try:
        check_checkpoint_fits(weights, names_and_shapes(tensors))
    except DamagedTensorsError as error:
        logger.warning("%s", error)


def check_writable(directory: Path, key: str) -> None:
    """Make `directory`, and a file in it that is gone at once."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: cannot write to {str(directory)!r}: {error.strerror}; name another directory, or remove what is "
            "in the way"
        ) from error
