"""What can be known to go wrong before Ray starts: everything but the machines and the run itself.

Each check raises ValueError with what to change.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from nemo_rl.algorithms.rollout_config import RolloutMasterConfig
from nemo_rl.data.dataloader import PromptDataset
from nemo_rl.data.processing import PromptProcessor
from nemo_rl.data.setup import DataSetup
from nemo_rl.environments.registry import find_env_class
from nemo_rl.models.policy.checkpoint import names_and_shapes, policy_tensors
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.lora import apply_lora
from nemo_rl.models.policy.moe import num_experts
from nemo_rl.models.policy.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.parallelize import build_on_meta
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointManager, check_identity, require_optimizer
from nemo_rl.utils.checkpoint_tensors import DamagedTensorsError, check_checkpoint_fits
from nemo_rl.utils.config import CheckpointingConfig

logger = logging.getLogger(__name__)

NUM_TRIED_PROMPTS = 32


def check_environments(config: RolloutMasterConfig, data: DataSetup) -> None:
    """Whether the class of every environment that is used can be imported."""
    for name in sorted(set(data.task_to_env.values())):
        find_env_class(config.env[name].type)


def check_reward_models(config: RolloutMasterConfig, data: DataSetup, process: PromptProcessor) -> None:
    """Whether what reward models score is handed to them: the conversation, by `conversation_processor` or another."""
    for dataset in (data.train, data.validation):
        starts = np.cumsum([0, *(len(part) for part in dataset.parts)][:-1]) if dataset is not None else ()
        for start in starts:
            assert dataset is not None
            prompt = dataset[int(start)]
            name = data.tasks[prompt.task_name].env_name
            if config.env[name].type != "reward_model" or "messages" in (process(prompt)["extra_env_info"] or {}):
                continue
            raise ValueError(
                f"dataset {prompt.task_name!r} is answered by the reward model env.{name}, which scores conversations, "
                "and its processor hands none on; set processor: conversation_processor for it, or in data.default"
            )


def check_optimizer(policy: PolicyConfig) -> None:
    """Whether optimizer and scheduler can be made, on one small parameter."""
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
