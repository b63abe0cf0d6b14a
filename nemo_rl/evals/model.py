"""The model of an evaluation: a hub name, a directory, a tiny model or a checkpoint; found and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerFast

from nemo_rl.config.loader import build_config
from nemo_rl.data.tiny_model import resolve_model
from nemo_rl.evals.config import EvalMasterConfig
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.convert import CheckpointModel, is_checkpoint, model_of_checkpoint
from nemo_rl.models.policy.pretrained import check_fit, read_model_config
from nemo_rl.models.policy.weight_loading import weights_identity
from nemo_rl.utils.files import cache_root
from nemo_rl.utils.tokenizer import get_tokenizer

# Parts that evaluation shares with training name the keys of a training configuration.
KEYS = {
    "policy.generation.": "generation.",
    "policy.model_name": "generation.model_name",
    "policy.max_total_sequence_length": "generation.vllm_cfg.max_model_len",
    "policy.tokenizer.": "tokenizer.",
    "policy.hf_config_overrides": "generation.vllm_kwargs.hf_overrides",
    "grpo.seed": "eval.seed",
}


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """What the engines are made from, checked."""

    model_path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    name: str  # for people
    identity: dict[str, Any]


def in_eval_keys(text: str) -> str:
    """A message about a training configuration as one about an evaluation."""
    for training, evaluation in KEYS.items():
        text = text.replace(training, evaluation)
    return text


def prepare_model(config: EvalMasterConfig) -> EvalModel:
    """Find the model, convert it when it is a checkpoint that no engine can read, and check that everything fits.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with what to change.
    """
    name = config.generation.model_name
    checkpoint = _checkpoint(config)
    model_path = str(checkpoint.model) if checkpoint is not None else resolve_model(name)
    tokenizer_path = resolve_model(config.tokenizer.name)
    if config.tokenizer.name == name:
        tokenizer_path = model_path
    policy = _as_policy(config)
    model = read_model_config(policy, model_path)
    tokenizer = get_tokenizer(config.tokenizer.model_copy(update={"name": tokenizer_path}))
    check_fit(policy, model, tokenizer)
    return EvalModel(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        tokenizer=tokenizer,
        name=name if checkpoint is None else str(checkpoint.step),
        identity={
            "generation.model_name": {
                "weights": checkpoint.digest if checkpoint is not None else weights_identity(name, model_path, model),
                "config_hash": _digest(model.to_json_string()),
            },
            "tokenizer": {
                "vocabulary_hash": _digest(repr(sorted(tokenizer.get_vocab().items()))),
                "chat_template_hash": _digest(str(tokenizer.chat_template)),
            },
        },
    )


def _checkpoint(config: EvalMasterConfig) -> CheckpointModel | None:
    path = Path(config.generation.model_name).expanduser()
    if (path / "config.json").is_file() or not is_checkpoint(path):
        return None
    return model_of_checkpoint(
        path, dtype=config.generation.vllm_cfg.dtype, cache=cache_root(), resolve_base=resolve_model
    )


def _as_policy(config: EvalMasterConfig) -> RolloutPolicyConfig:
    """The section `policy` that checks of models and tokenizers ask for."""
    own = ("model_name", "num_prompts_per_step")
    generation = config.generation.model_dump()
    values: Mapping[str, Any] = {
        "model_name": config.generation.model_name,
        "precision": config.generation.vllm_cfg.dtype,
        "max_total_sequence_length": config.generation.vllm_cfg.max_model_len,
        "train_global_batch_size": 1,
        "tokenizer": config.tokenizer.model_dump(),
        "generation": {key: value for key, value in generation.items() if key not in own},
    }
    return build_config(RolloutPolicyConfig, values)


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
